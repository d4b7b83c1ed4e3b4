// An independent OpenID provider as an external issuer: JWT access tokens for one audience, for a client
// that shows its own credentials. Prints "ready" when it listens.
import { Provider } from 'oidc-provider'

const [port, audience, clientId, clientSecret] = process.argv.slice(2)
const issuer = `http://127.0.0.1:${port}`
const provider = new Provider(issuer, {
  clients: [{
    client_id: clientId,
    client_secret: clientSecret,
    grant_types: ['client_credentials'],
    redirect_uris: [],
    response_types: [],
  }],
  features: {
    clientCredentials: { enabled: true },
    devInteractions: { enabled: false },
    resourceIndicators: {
      enabled: true,
      defaultResource: () => audience,
      getResourceServerInfo: () => ({
        scope: 'call', audience, accessTokenFormat: 'jwt', accessTokenTTL: 600, jwt: { sign: { alg: 'RS256' } },
      }),
    },
  },
})
provider.listen(Number(port), '127.0.0.1', () => console.log('ready'))
