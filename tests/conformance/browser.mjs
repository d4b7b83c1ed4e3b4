// Chromium for the scripts beside this one, and a client's callback that ends each walk.
import { createServer } from 'node:http'
import { chromium } from 'playwright-core'

export const given = JSON.parse(process.argv[2])

export async function open() {
  // A user's machine has a sandbox; this one may run it as root.
  return chromium.launch({ executablePath: given.chromium, args: ['--no-sandbox'] })
}

// `pages`: by path, the HTML that is served beside /callback. `came`: the queries that the callback was given.
export async function serve(port, pages = {}) {
  const came = []
  const server = createServer((request, response) => {
    const url = new URL(request.url, `http://127.0.0.1:${port}`)
    if (url.pathname === '/callback') came.push(Object.fromEntries(url.searchParams))
    response.setHeader('content-type', 'text/html')
    response.end(pages[url.pathname] ?? '<title>back</title>done')
  })
  await new Promise((ready) => server.listen(port, '127.0.0.1', ready))
  return { came, close: () => { server.closeAllConnections(); server.close() } }
}

// What the browser complains of: a policy that forbids what a page does, a script that fails.
export function watch(page) {
  const violations = []
  page.on('console', (message) => {
    const text = message.text() // a refusal and a missing favicon are no complaints
    if (message.type() === 'error' && !text.startsWith('Failed to load resource')) violations.push(text)
  })
  page.on('pageerror', (error) => violations.push(String(error)))
  return violations
}

export async function signIn(page, email = given.email, password = given.password) {
  await page.getByLabel('E-mail address').fill(email)
  await page.getByLabel('Password').fill(password)
  await page.getByRole('button', { name: 'Sign in', exact: true }).click()
}

export function tell(found) {
  console.log(JSON.stringify(found))
}
