# Read by a shell that runs the examples: `. examples/env.sh`. Sets what the official SDKs read.
_home="${TOLLGATE_HOME:-.tollgate}"
_field() { sed -n 's/.*"'"$1"'": *"\([^"]*\)".*/\1/p' "$_home/credentials.json"; }
export OPENAI_BASE_URL="$(_field base_url)"
export OPENAI_API_KEY="$(_field api_key)"
export OPENAI_ADMIN_KEY="$(_field admin_key)"
export ANTHROPIC_BASE_URL="${OPENAI_BASE_URL%/v1}"
export ANTHROPIC_API_KEY="$OPENAI_API_KEY"
export MODEL="${MODEL:-penny}"
