// People sign in at Tollgate's consent page by an independent OpenID provider, in a browser.
import { given, open, serve, signIn, tell, watch } from './browser.mjs'

const client = await serve(given.callbackPort)
const chromium = await open()
const found = { seen: {} }

// Up to the provider's own login form, by the link on Tollgate's login page.
async function toProvider(context) {
  const page = await context.newPage()
  page.problems = watch(page)
  await page.goto(given.url)
  const [request] = await Promise.all([
    page.waitForRequest((each) => each.url().startsWith(`${given.provider}/auth?`)),
    page.getByRole('link', { name: 'Sign in with oidc-provider' }).click(),
  ])
  return [page, Object.fromEntries(new URL(request.url()).searchParams)]
}

// The provider's login and consent; the callback's URL, which is not followed if `stop`.
async function atProvider(page, login, { stop = false } = {}) {
  let callback
  const network = await page.context().newCDPSession(page) // routes of a page do not see redirects
  network.on('Fetch.requestPaused', async ({ requestId, request }) => {
    callback = request.url
    await (stop
      ? network.send('Fetch.fulfillRequest', { requestId, responseCode: 200 })
      : network.send('Fetch.continueRequest', { requestId }))
  })
  await network.send('Fetch.enable', { patterns: [{ urlPattern: `${given.issuer}/oauth/external/*/callback?*` }] })
  await page.locator('input[name=login]').fill(login)
  await page.locator('input[name=password]').fill('anything')
  await page.locator('button[type=submit]').click()
  await page.getByRole('button', { name: 'Continue' }).click()
  await page.waitForURL((url) => url.href.startsWith(given.issuer) || url.port === String(given.callbackPort))
  await page.waitForLoadState()
  await network.detach()
  return callback
}

const heading = (page) => page.locator('h1').innerText()

// Who is known by a verified address: linked, consents, is sent back with a code.
const mine = await chromium.newContext()
const [page, asked] = await toProvider(mine)
found.asked = asked
const callback = await atProvider(page, 'ann')
found.consentOf = await page.locator('dd').first().innerText()
await page.getByRole('button', { name: 'Allow' }).click()
await page.waitForURL('**/callback?*')
found.answer = client.came.at(-1)
found.violations = page.problems

// The same answer again, and in another browser.
await page.goto(callback)
found.seen.replayed = await heading(page)
const thief = await chromium.newContext()
const stolen = await thief.newPage()
await stolen.goto(callback)
found.seen.replayedElsewhere = await heading(stolen)

// Signed in until signed out, in that browser alone.
await page.goto(`${given.issuer}/oauth/account`)
found.seen.account = await heading(page)
await page.getByRole('button', { name: 'Sign out' }).click()
found.seen.signedOut = await heading(page)
await page.goto(given.url)
found.seen.afterwards = await heading(page)
await mine.close()

// An answer that says it is of another issuer; one that never got to the browser that began.
for (const [name, change] of [
  ['mixedUp', (url) => url.searchParams.set('iss', 'https://evil.example')],
  ['withoutIss', (url) => url.searchParams.delete('iss')],
  ['otherCode', (url) => url.searchParams.set('code', 'c0de')],
]) {
  const context = await chromium.newContext()
  const [victim] = await toProvider(context)
  const url = new URL(await atProvider(victim, 'ann', { stop: true }))
  change(url)
  await victim.goto(url.href)
  found.seen[name] = await heading(victim)
  await context.close()
}
const [began] = await toProvider(thief)
const unused = await atProvider(began, 'ann', { stop: true })
const other = await chromium.newContext()
const injected = await other.newPage()
await injected.goto(given.url) // it has a cookie of its own
await injected.goto(unused)
found.seen.injected = await heading(injected)

// Nobody is known by an address that the provider has not verified; who is new may be let in by a rule.
for (const login of ['bob', 'carl']) {
  const context = await chromium.newContext()
  const [somebody] = await toProvider(context)
  await atProvider(somebody, login)
  found.seen[login] = await heading(somebody)
  await context.close()
}

// A password works as before, for the very same user.
const plain = await (await chromium.newContext()).newPage()
await plain.goto(given.url)
await signIn(plain)
found.seen.byPassword = await heading(plain)

await chromium.close()
client.close()
tell(found)
