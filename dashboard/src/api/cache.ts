import { QueryCache, QueryClient } from "@tanstack/react-query";
import { ApiError } from "./client";

export const SESSION_KEY = ["session"] as const;
const MAX_RETRIES = 2;

/** A cache that notices the end of the session, whichever request meets it first. */
export function makeQueryClient(): QueryClient {
  const client = new QueryClient({
    queryCache: new QueryCache({
      onError: (error) => {
        if (error instanceof ApiError && error.status === 401) {
          client.setQueryData(SESSION_KEY, null);
        }
      },
    }),
    defaultOptions: {
      queries: {
        // news come by the stream; this bounds how old a page is without it
        staleTime: 2_000,
        gcTime: 60_000,
        retry: (failures, error) =>
          failures < MAX_RETRIES && !(error instanceof ApiError && !error.passing),
      },
    },
  });
  return client;
}
