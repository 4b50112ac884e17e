import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { SIGN_IN_KEY } from "./cache";
import { ApiError, api, body } from "./client";
import type { Caller, SignedIn } from "./types";

const CALLER_KEY = ["caller"] as const;

/** Cluster that the user is signed in to, or null if nobody is signed in. */
export function useSignedIn() {
  return useQuery({ queryKey: SIGN_IN_KEY, queryFn: readSignIn, staleTime: 60_000 });
}

/** The user's token; undefined while it is not known. */
export function useCaller(): Caller | undefined {
  const queryFn = async () => body(await api.GET("/api/v1/me"));
  return useQuery({ queryKey: CALLER_KEY, queryFn, staleTime: 60_000 }).data;
}

async function readSignIn(): Promise<SignedIn | null> {
  try {
    return body(await api.GET("/api/v1/sign-in"));
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
    mutationFn: (token: string) => api.POST("/api/v1/sign-in", { body: { token } }),
    onSuccess: () => {
      client.removeQueries({ queryKey: CALLER_KEY });
      return client.invalidateQueries({ queryKey: SIGN_IN_KEY });
    },
  });
}

export function useSignOut() {
  const client = useQueryClient();
  return useMutation({
    mutationFn: () => api.DELETE("/api/v1/sign-in"),
    onSuccess: () => {
      client.setQueryData(SIGN_IN_KEY, null);
      // Remove all cached data of the user.
      client.removeQueries({ predicate: ({ queryKey }) => queryKey[0] !== SIGN_IN_KEY[0] });
    },
  });
}
