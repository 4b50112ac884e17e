import { sha256 } from "@noble/hashes/sha2.js";
import { bytesToHex } from "@noble/hashes/utils.js";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import type { Schema } from "../lib/schema";
import { ApiError, api, body, problemOf } from "./client";
import type { Job, Plan, Spec, Validation } from "./types";

/** What the API makes of the text: the job that it describes, or what is wrong with it. */
export function useValidation(text: string) {
  return useQuery({
    queryKey: ["validation", text],
    queryFn: async (): Promise<Validation> =>
      body(await api.POST("/api/v1/jobs/validate", { body: { yaml: text } })),
    placeholderData: (before) => before,
    staleTime: Number.POSITIVE_INFINITY,
    gcTime: 0,
  });
}

/** What a job file may say. */
export function useSpecSchema() {
  return useQuery({
    queryKey: ["schema", "job"],
    queryFn: async () => body(await api.GET("/api/v1/schema/job")) as Schema,
    staleTime: Number.POSITIVE_INFINITY,
  });
}

/** A controller that has just started tells its pools soon. */
const PLAN_RETRIES = 10;
const PLAN_RETRY_MS = 1_000;

export function usePlan() {
  return useMutation({
    retry: (failures, error) =>
      failures < PLAN_RETRIES && error instanceof ApiError && error.status === 409,
    retryDelay: PLAN_RETRY_MS,
    mutationFn: async (spec: Spec): Promise<Plan> =>
      body(await api.POST("/api/v1/plan", { body: { spec } })),
  });
}

export type Order = { spec: Spec; zip: Uint8Array; key: string };

/** Uploads the package, then submits; `key` makes a repetition harmless. */
export function useSubmit() {
  const queries = useQueryClient();
  return useMutation({
    mutationFn: async ({ spec, zip, key }: Order): Promise<Job> => {
      // crypto.subtle is only there over https, and a stack at home has none
      const digest = bytesToHex(sha256(zip));
      await upload(digest, zip);
      return body(
        await api.POST("/api/v1/jobs", {
          params: { header: { "idempotency-key": key } },
          body: { spec, package: digest },
        }),
      );
    },
    onSuccess: () => queries.invalidateQueries({ queryKey: ["jobs"] }),
  });
}

async function upload(digest: string, zip: Uint8Array): Promise<void> {
  const response = await fetch(`/api/v1/packages/${digest}`, {
    method: "PUT",
    credentials: "same-origin",
    headers: { "Content-Type": "application/zip", "X-Vcasgd-Request": "dashboard" },
    body: zip as Uint8Array<ArrayBuffer>,
  });
  if (!response.ok) throw await problemOf(response);
}
