import { QueryCache, QueryClient } from "@tanstack/react-query";
import { ApiError } from "./client";

export const SIGN_IN_KEY = ["sign-in"] as const;
const MAX_RETRIES = 2;

/** Returns a query cache that ends the sign-in if any request is unauthorized. */
export function makeQueryClient(): QueryClient {
  const client = new QueryClient({
    queryCache: new QueryCache({
      onError: (error) => {
        if (error instanceof ApiError && error.status === 401) {
          client.setQueryData(SIGN_IN_KEY, null);
        }
      },
    }),
    defaultOptions: {
      queries: {
        // A stack on this computer can be reached without a network.
        networkMode: "always",
        // The stream invalidates queries; this bounds their age without it.
        staleTime: 2_000,
        gcTime: 60_000,
        retry: (failures, error) =>
          failures < MAX_RETRIES && !(error instanceof ApiError && !error.retryable),
      },
      mutations: { networkMode: "always" },
    },
  });
  return client;
}
