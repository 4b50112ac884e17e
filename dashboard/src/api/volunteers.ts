import { useQuery } from "@tanstack/react-query";
import { ApiError, api, body } from "./client";

/** Milliseconds between two requests; the API reads the ledger as often. */
const POLL_MS = 5_000;

/** Public jobs and their contributors. Needs no session. */
export function useVolunteers() {
  return useQuery({
    queryKey: ["volunteers"],
    queryFn: async () => body(await api.GET("/api/v1/public/volunteers")),
    refetchInterval: ({ state }) => (isPrivate(state.error) ? false : POLL_MS),
  });
}

/** True if the cluster has no public page. */
export function isPrivate(error: unknown): boolean {
  return error instanceof ApiError && error.status === 404;
}
