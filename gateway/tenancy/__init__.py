"""Organizations, projects, keys and plans: tables and the verbs that change them.

The columns and fields of limits are made of `gateway.principal.PlanLimit`; a new one needs only its
migration.
"""
