// The whole code flow with oauth4webapi: discovery, PKCE, nonce, RFC 9207 `iss`, RFC 8707 `resource`, the ID token
// and the JWT access token verified with the JWKS, userinfo, refresh, introspection, revocation; with DPoP if asked.
// Prints the URL to open, reads the URL that came back from stdin, prints what it got as JSON.
import * as oauth from 'oauth4webapi'
import { createInterface } from 'node:readline/promises'

const asked = JSON.parse(process.argv[2])
const { clientId, clientSecret, redirectUri, resource } = asked
const loopback = { [oauth.allowInsecureRequests]: true }
const issuer = new URL(asked.issuer)
const found = await oauth.discoveryRequest(issuer, { ...loopback, algorithm: 'oidc' })
const as = await oauth.processDiscoveryResponse(issuer, found)
const client = { client_id: clientId }
const authentication = clientSecret ? oauth.ClientSecretBasic(clientSecret) : oauth.None()
const DPoP = asked.dpop ? oauth.DPoP(client, await oauth.generateKeyPair('ES256')) : undefined

const verifier = oauth.generateRandomCodeVerifier()
const state = oauth.generateRandomState()
const nonce = oauth.generateRandomNonce()
const url = new URL(as.authorization_endpoint)
url.search = new URLSearchParams({
  client_id: clientId,
  redirect_uri: redirectUri,
  response_type: 'code',
  scope: 'openid email mcp:call offline_access',
  state,
  nonce,
  resource,
  code_challenge: await oauth.calculatePKCECodeChallenge(verifier),
  code_challenge_method: 'S256',
}).toString()
console.log(url.href)
const answer = new URL(await createInterface({ input: process.stdin }).question(''))
const parameters = oauth.validateAuthResponse(as, client, answer, state)

const options = { ...loopback, DPoP, additionalParameters: { resource } }
const response = await oauth.authorizationCodeGrantRequest(
  as, client, authentication, parameters, redirectUri, verifier, options)
const first = await oauth.processAuthorizationCodeResponse(
  as, client, response, { expectedNonce: nonce, requireIdToken: true })
await oauth.validateApplicationLevelSignature(as, response, loopback)
const idToken = oauth.getValidatedIdTokenClaims(first)

const call = async (token) => {
  const message = JSON.stringify({ jsonrpc: '2.0', id: 1, method: 'tools/list' })
  const headers = new Headers({ 'content-type': 'application/json' })
  const said = await oauth.protectedResourceRequest(
    token, 'POST', new URL(resource), headers, message, { ...loopback, DPoP })
  return (await said.json()).error.code
}
const shown = new Request(resource, { headers: { authorization: `Bearer ${first.access_token}` } })
const subject = DPoP
  ? idToken.sub // its access token is checked with a proof, by the resource itself
  : (await oauth.validateJwtAccessToken(as, shown, resource, loopback)).sub
const info = await oauth.userInfoRequest(as, client, first.access_token, { ...loopback, DPoP })
await oauth.processUserInfoResponse(as, client, idToken.sub, info)

const again = await oauth.refreshTokenGrantRequest(
  as, client, authentication, first.refresh_token, options)
const second = await oauth.processRefreshTokenResponse(as, client, again)
const codes = [await call(first.access_token), await call(second.access_token)]

const active = []
const introspect = async () => {
  if (!clientSecret) return // a public client may not ask
  const said = await oauth.introspectionRequest(as, client, authentication, second.access_token, loopback)
  active.push((await oauth.processIntrospectionResponse(as, client, said)).active)
}
await introspect()
await oauth.processRevocationResponse(
  await oauth.revocationRequest(as, client, authentication, second.refresh_token, loopback))
await introspect()
let afterRevocation
try {
  await oauth.processRefreshTokenResponse(as, client, await oauth.refreshTokenGrantRequest(
    as, client, authentication, second.refresh_token, options))
} catch (error) {
  afterRevocation = error.error
}
console.log(JSON.stringify({
  subject, idTokenSubject: idToken.sub, tokenType: first.token_type, codes, active, afterRevocation,
  rotated: first.refresh_token !== second.refresh_token,
}))
process.exit(0)
