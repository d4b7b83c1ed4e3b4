// The pages of the authorization server in a browser: by the keyboard alone, in a frame of another site, posted to
// from another site, and with a passkey of a virtual authenticator.
import { given, open, serve, signIn, tell, watch } from './browser.mjs'

// 127.0.0.1 is another site than localhost, where the issuer is.
const evil = `http://127.0.0.1:${given.callbackPort}`
const forge = (fields) => `<form method=post action="${given.issuer}/oauth/authorize">${
  Object.entries(fields).map(([name, value]) => `<input name=${name}>`).join('')}<button>go</button></form>`
const client = await serve(given.callbackPort, {
  '/frame': `<iframe src="${given.url.replaceAll('&', '&amp;')}"></iframe>`,
  '/forge': forge({ form_token: '', request: '', decision: '' }),
})
const chromium = await open()
const context = await chromium.newContext()
const page = await context.newPage()
const violations = watch(page)
const heading = (where = page) => where.locator('h1').innerText()
const found = { violations }

// Tab from the top of the page to what has this accessible name.
async function tabTo(name) {
  for (let i = 0; i < 20; i++) {
    await page.keyboard.press('Tab')
    const focused = await page.evaluate(() => {
      const at = document.activeElement
      const shown = getComputedStyle(at)
      return { name: (at.labels?.[0] ?? at).innerText, ring: shown.outlineStyle !== 'none' || shown.boxShadow !== 'none' }
    })
    if (focused.name === name) return focused.ring
  }
  throw new Error(`no ${name} for the keyboard`)
}

// Signing in and consenting without a mouse; every step shows where the focus is.
const rings = []
await page.goto(given.url)
rings.push(await tabTo('E-mail address'))
await page.keyboard.type(given.email)
rings.push(await tabTo('Password'))
await page.keyboard.type(given.password)
await page.keyboard.press('Enter')
await page.getByRole('button', { name: 'Allow' }).waitFor()
found.consent = {
  heading: await heading(),
  text: await page.locator('main').innerText(),
  scripts: await page.locator('script').count(),
  handlers: await page.evaluate(() => [...document.querySelectorAll('*')].filter(
    (each) => [...each.attributes].some((a) => a.name.startsWith('on') || a.name === 'style')).length),
}
const consent = Object.fromEntries(await page.locator('input[type=hidden]').evaluateAll(
  (inputs) => inputs.map((each) => [each.name, each.value])))
// A policy that a script put into the page would meet.
found.injected = await page.evaluate(() => {
  const script = document.createElement('script')
  script.textContent = 'window.injected = true'
  document.body.append(script)
  return window.injected ?? false
})
found.forbidden = violations.splice(0).length
rings.push(await tabTo('Deny'))
await page.keyboard.press('Enter')
await page.waitForURL('**/callback?*')
found.denied = client.came.at(-1)
await page.goto(given.url)
rings.push(await tabTo('Allow'))
await page.keyboard.press('Enter')
await page.waitForURL('**/callback?*')
found.allowed = client.came.at(-1)
found.rings = rings

// In a frame of another site; and posted from there, by somebody who even knows the form's token.
await page.goto(`${evil}/frame`)
await page.waitForTimeout(500)
found.framed = await page.frames()[1].locator('form').count()
const before = client.came.length
await page.goto(`${evil}/forge`)
for (const [name, value] of Object.entries({ ...consent, decision: 'allow' })) {
  await page.locator(`input[name=${name}]`).fill(value)
}
await page.getByRole('button', { name: 'go' }).click()
await page.waitForURL(`${given.issuer}/**`)
found.forged = { heading: await heading(), came: client.came.length - before }

// A passkey: added by who is signed in, then enough to sign in.
violations.splice(0)
const device = await context.newCDPSession(page)
await device.send('WebAuthn.enable')
const { authenticatorId } = await device.send('WebAuthn.addVirtualAuthenticator', { options: {
  protocol: 'ctap2', transport: 'internal', hasResidentKey: true, hasUserVerification: true,
  isUserVerified: true, automaticPresenceSimulation: true,
} })
await page.goto(`${given.issuer}/oauth/account`)
await page.getByLabel('Name of this device').fill('Virtual')
await page.getByRole('button', { name: 'Add a passkey' }).click()
await page.getByRole('button', { name: 'Remove Virtual' }).waitFor()
const { credentials } = await device.send('WebAuthn.getCredentials', { authenticatorId })
found.passkey = { rpId: credentials[0].rpId, resident: credentials[0].isResidentCredential }
await page.getByRole('button', { name: 'Sign out' }).click()
await page.goto(given.url)
found.passkey.signedOut = await heading()
// A device that does not verify who holds it is not enough.
await device.send('WebAuthn.setUserVerified', { authenticatorId, isUserVerified: false })
await page.getByRole('button', { name: 'Sign in with a passkey' }).click()
await page.getByText('The passkey was not accepted.').waitFor()
found.passkey.unverified = await heading()
await device.send('WebAuthn.setUserVerified', { authenticatorId, isUserVerified: true })
await page.getByRole('button', { name: 'Sign in with a passkey' }).click()
await page.getByRole('button', { name: 'Allow' }).click()
await page.waitForURL('**/callback?*')
found.passkey.allowed = client.came.at(-1)
// Removed, it opens nothing any more.
await page.goto(`${given.issuer}/oauth/account`)
await page.getByRole('button', { name: 'Remove Virtual' }).click()
await page.getByRole('button', { name: 'Sign out' }).click()
await page.goto(given.url)
await page.getByRole('button', { name: 'Sign in with a passkey' }).click()
await page.getByText('The passkey was not accepted.').waitFor()
found.passkey.removed = await heading()

// The same pages without any script: a password is enough.
const plain = await chromium.newContext({ javaScriptEnabled: false })
const bare = await plain.newPage()
await bare.goto(given.url)
await signIn(bare)
found.withoutScripts = await heading(bare)

await chromium.close()
client.close()
tell(found)
