import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { SESSION_KEY } from "./cache";
import { ApiError, api, body } from "./client";
import type { Caller, Session } from "./types";

const CALLER_KEY = ["caller"] as const;

/** Session of the user, or null if nobody is signed in. */
export function useSession() {
  return useQuery({ queryKey: SESSION_KEY, queryFn: readSession, staleTime: 60_000 });
}

/** The user's token; undefined while it is not known. */
export function useCaller(): Caller | undefined {
  const queryFn = async () => body(await api.GET("/api/v1/me"));
  return useQuery({ queryKey: CALLER_KEY, queryFn, staleTime: 60_000 }).data;
}

async function readSession(): Promise<Session | null> {
  try {
    return body(await api.GET("/api/v1/session"));
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) {
      return null;
    }
    throw error;
  }
}

export function useSignIn() {
  const client = useQueryClient();
  return useMutation({
    mutationFn: (token: string) => api.POST("/api/v1/session", { body: { token } }),
    onSuccess: () => {
      client.removeQueries({ queryKey: CALLER_KEY });
      return client.invalidateQueries({ queryKey: SESSION_KEY });
    },
  });
}

export function useSignOut() {
  const client = useQueryClient();
  return useMutation({
    mutationFn: () => api.DELETE("/api/v1/session"),
    onSuccess: () => {
      client.setQueryData(SESSION_KEY, null);
      // Remove all cached data of the session.
      client.removeQueries({ predicate: ({ queryKey }) => queryKey[0] !== SESSION_KEY[0] });
    },
  });
}
