"""OpenAI's organization API: usage reports, audit log and members, as structs."""
