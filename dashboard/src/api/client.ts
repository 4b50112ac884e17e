import createClient, { type Middleware } from "openapi-fetch";
import { setReachable, setUnavailable } from "./reachable";
import type { paths } from "./schema";

/** Error of a request: an RFC 9457 problem, or no answer. */
export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly remedy: string | null = null,
    readonly field: string | null = null,
  ) {
    super(message);
    this.name = "ApiError";
  }

  /** True if a retry can help. */
  get retryable(): boolean {
    return this.status === 0 || this.status >= 500 || this.status === 429;
  }
}

/** Returns the message of an error, and its remedy in parentheses. */
export function explained(error: unknown): string {
  const message = error instanceof Error ? error.message : String(error);
  return error instanceof ApiError && error.remedy ? `${message} (${error.remedy})` : message;
}

type Problem = { detail?: string; title?: string; remedy?: string | null; field?: string | null };

const sameOrigin: Middleware = {
  onRequest({ request }) {
    request.headers.set("X-Vcasgd-Request", "dashboard");
    return request;
  },
  async onResponse({ response }) {
    if (response.ok) {
      setReachable(true);
      return;
    }
    const error = await problemOf(response);
    if (response.status === 503) setUnavailable(error.message, error.remedy);
    else setReachable(true);
    throw error;
  },
  onError() {
    setReachable(false);
    return new ApiError("The API can't be reached.", 0, "The page retries automatically.");
  },
};

export async function problemOf(response: Response): Promise<ApiError> {
  const problem = (await response.json().catch(() => ({}))) as Problem;
  const message = problem.detail ?? problem.title ?? `The API answered ${response.status}.`;
  return new ApiError(message, response.status, problem.remedy ?? null, problem.field ?? null);
}

export const api = createClient<paths>({
  baseUrl: window.location.origin,
  credentials: "same-origin",
  fetch: (request) => fetch(request),
});
api.use(sameOrigin);

/** Returns the body of an answer; errors are thrown before. */
export function body<T>(answer: { data?: T }): T {
  return answer.data as T;
}
