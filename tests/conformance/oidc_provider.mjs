// An independent OpenID provider as an external issuer: JWT access tokens for one audience, for a client that shows
// its own credentials; and logins, by its own pages, of whom it finds behind any name and password. PKCE is a must.
// Prints "ready" when it listens.
import { Provider } from 'oidc-provider'

const { port, audience, clientId, clientSecret, redirectUri, accounts } = JSON.parse(process.argv[2])
const issuer = `http://127.0.0.1:${port}`
const provider = new Provider(issuer, {
  clients: [
    {
      client_id: clientId,
      client_secret: clientSecret,
      grant_types: ['client_credentials'],
      redirect_uris: [],
      response_types: [],
    },
    {
      client_id: `${clientId}-login`,
      client_secret: clientSecret,
      grant_types: ['authorization_code'],
      redirect_uris: [redirectUri ?? `${issuer}/unused`],
    },
  ],
  claims: { openid: ['sub'], email: ['email', 'email_verified'], profile: ['name'] },
  cookies: { keys: ['only for a test'] },
  findAccount: (_, id) => accounts?.[id] && {
    accountId: id, claims: () => ({ sub: id, ...accounts[id] }),
  },
  pkce: { required: () => true },
  features: {
    clientCredentials: { enabled: true },
    devInteractions: { enabled: true },
    resourceIndicators: {
      enabled: true,
      defaultResource: (ctx) => ctx.oidc.client?.clientId === clientId ? audience : [],
      getResourceServerInfo: () => ({
        scope: 'call', audience, accessTokenFormat: 'jwt', accessTokenTTL: 600, jwt: { sign: { alg: 'RS256' } },
      }),
    },
  },
})
provider.listen(Number(port), '127.0.0.1', () => console.log('ready'))
