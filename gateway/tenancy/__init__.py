"""Organizations, projects, keys and plans: tables and the verbs that change them."""
