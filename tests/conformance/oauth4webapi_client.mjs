// The whole code flow with oauth4webapi: discovery, PKCE, RFC 9207 `iss`, RFC 8707 `resource`, refresh.
// Prints the URL to open, reads the URL that came back from stdin, prints what it got as JSON.
import * as oauth from 'oauth4webapi'
import { createInterface } from 'node:readline/promises'

const [issuerUrl, clientId, redirectUri, resource] = process.argv.slice(2)
const loopback = { [oauth.allowInsecureRequests]: true }
const issuer = new URL(issuerUrl)
const found = await oauth.discoveryRequest(issuer, { ...loopback, algorithm: 'oauth2' })
const as = await oauth.processDiscoveryResponse(issuer, found)
const client = { client_id: clientId }
const verifier = oauth.generateRandomCodeVerifier()
const state = oauth.generateRandomState()
const url = new URL(as.authorization_endpoint)
url.search = new URLSearchParams({
  client_id: clientId,
  redirect_uri: redirectUri,
  response_type: 'code',
  scope: 'mcp:call offline_access',
  state,
  resource,
  code_challenge: await oauth.calculatePKCECodeChallenge(verifier),
  code_challenge_method: 'S256',
}).toString()
console.log(url.href)
const answer = new URL(await createInterface({ input: process.stdin }).question(''))
const parameters = oauth.validateAuthResponse(as, client, answer, state)
const asked = { ...loopback, additionalParameters: { resource } }
const response = await oauth.authorizationCodeGrantRequest(
  as, client, oauth.None(), parameters, redirectUri, verifier, asked)
const first = await oauth.processAuthorizationCodeResponse(as, client, response)
const again = await oauth.refreshTokenGrantRequest(
  as, client, oauth.None(), first.refresh_token, asked)
const second = await oauth.processRefreshTokenResponse(as, client, again)
console.log(JSON.stringify({ first: first.access_token, second: second.access_token, rotated: first.refresh_token !== second.refresh_token }))
process.exit(0)
