// What the gateway is asked: GET /status, POST /operations/NAME. The token is kept in this tab.

const KEPT = 'up-streamer token';
const ANSWER_MS = 10000;
const HOW = 'In the configuration: [admin] token_file = "FILE", and a long random text in that file.';

let token = sessionStorage.getItem(KEPT) ?? '';
let onUnknown = () => {};

export const hasToken = () => token !== '';
export const whenTokenIsUnknown = callback => { onUnknown = callback; };

export function setToken(given) {
  token = given.trim();
  if (token) sessionStorage.setItem(KEPT, token);
  else sessionStorage.removeItem(KEPT);
}

/** The gateway has answered, with an error. `status`: of HTTP. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const shown = token;
  const headers = {...options.headers, ...(shown ? {Authorization: `Bearer ${shown}`} : {})};
  let answer;
  try {
    answer = await fetch(path, {
      ...options, headers, cache: 'no-store', credentials: 'omit', signal: AbortSignal.timeout(ANSWER_MS),
    });
  } catch (error) {
    if (error instanceof TypeError && /ISO-8859-1|ByteString|Invalid/.test(error.message)) {
      throw new Refused(401, 'a token has no such characters');
    }
    throw new Error('the gateway does not answer');
  }
  const text = await answer.text();
  if (answer.status === 401) {
    if (shown === token) onUnknown(shown !== '');
    throw new Refused(401, 'the token is not accepted');
  }
  let told = null;
  try { told = JSON.parse(text); } catch { /* a plain text */ }
  if (!answer.ok && !(path === '/status' && told?.endpoints)) {
    const why = told?.message ?? (text.trim().slice(0, 500) || `HTTP ${answer.status}`);
    throw new Refused(answer.status, why.includes('admin.token_file') ? `${why}. ${HOW}` : why);
  }
  if (told === null) throw new Refused(answer.status, 'the answer is no JSON');
  return told;
}

export const status = () => ask('/status');

export function operate(name, given = {}) {
  const body = JSON.stringify(given);
  return ask(`/operations/${name}`, {method: 'POST', headers: {'Content-Type': 'application/json'}, body});
}
