// The MCP TypeScript SDK's client, with an OAuth provider that remembers in memory: from a 401 to a tool's result.
// Prints the URL to open, reads the URL that came back from stdin, prints what it got as JSON.
import { createInterface } from 'node:readline/promises'
import { UnauthorizedError } from '@modelcontextprotocol/sdk/client/auth.js'
import { Client } from '@modelcontextprotocol/sdk/client/index.js'
import { StreamableHTTPClientTransport } from '@modelcontextprotocol/sdk/client/streamableHttp.js'

const { resource, redirectUri, tool } = JSON.parse(process.argv[2])
const kept = {}
const provider = {
  get redirectUrl() { return redirectUri },
  get clientMetadata() {
    return { client_name: 'Agent', redirect_uris: [redirectUri], token_endpoint_auth_method: 'none' }
  },
  clientInformation: () => kept.client,
  saveClientInformation: (client) => { kept.client = client },
  tokens: () => kept.tokens,
  saveTokens: (tokens) => { kept.tokens = tokens },
  redirectToAuthorization: (url) => { console.log(url.href) },
  saveCodeVerifier: (verifier) => { kept.verifier = verifier },
  codeVerifier: () => kept.verifier,
}

const open = () => new StreamableHTTPClientTransport(new URL(resource), { authProvider: provider })
const first = open()
let refused = false
try {
  await new Client({ name: 'agent', version: '1' }).connect(first)
} catch (error) {
  if (!(error instanceof UnauthorizedError)) throw error
  refused = true
}
const answer = new URL(await createInterface({ input: process.stdin }).question(''))
await first.finishAuth(answer.searchParams.get('code'))
const client = new Client({ name: 'agent', version: '1' })
await client.connect(open())
const tools = (await client.listTools()).tools.map((each) => each.name)
const result = await client.callTool({ name: tool, arguments: {} })
await client.close()
console.log(JSON.stringify({ refused, tools, text: result.content[0].text, scope: kept.tokens.scope }))
process.exit(0)
