import { sha256 } from "@noble/hashes/sha2.js";
import { bytesToHex } from "@noble/hashes/utils.js";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import type { Schema } from "../lib/schema";
import { ApiError, api, body, problemOf } from "./client";
import type { Job, Plan, Spec, Validation } from "./types";

/** Validates a job file; the result has the spec, or the errors. */
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

/** JSON schema of a job file. */
export function useSpecSchema() {
  return useQuery({
    queryKey: ["schema", "job"],
    queryFn: async () => body(await api.GET("/api/v1/schema/job")) as Schema,
    staleTime: Number.POSITIVE_INFINITY,
  });
}

/** Retries for a controller that has just started and has not published its pools. */
const PLAN_RETRIES = 10;
const PLAN_RETRY_MS = 1_000;

/** A job to plan, with what nothing has measured yet. */
export type Planned = { spec: Spec; samples?: number; samples_per_second?: number };

export function usePlan() {
  return useMutation({
    retry: (failures, error) =>
      failures < PLAN_RETRIES && error instanceof ApiError && error.status === 409,
    retryDelay: PLAN_RETRY_MS,
    mutationFn: async (planned: Planned): Promise<Plan> =>
      body(await api.POST("/api/v1/plan", { body: planned })),
  });
}

export type Submission = { spec: Spec; zip: Uint8Array; key: string };

/** Uploads the package and submits the job; `key` makes repetitions idempotent. */
export function useSubmit() {
  const queries = useQueryClient();
  return useMutation({
    mutationFn: async ({ spec, zip, key }: Submission): Promise<Job> => {
      // crypto.subtle requires https, which a local stack does not have.
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
