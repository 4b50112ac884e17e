import { useMutation, useQueries, useQuery, useQueryClient } from "@tanstack/react-query";
import { SQUARES } from "../lib/subtasks";
import { ApiError, api, body } from "./client";
import { usePolling } from "./live";
import { OVERVIEW } from "./patches";
import type { Job } from "./types";

/** Newest jobs of the list, besides the active ones. */
export const LIST_LIMIT = 500;
/** Points of a curve; about one per pixel of a narrow panel. */
const POINTS = 500;
/** Fields that the charts use; without this filter, answers are several times larger. */
const SERIES = "loss,logged,updates_per_second,staleness_mean,samples,spent_usd";
const ENDED: readonly string[] = ["succeeded", "failed", "cancelled"];

/** Returns the state of a job for people; an older API doesn't know queued jobs. */
export function statusOf(job: Pick<Job, "state" | "status">): string {
  return job.status || job.state;
}

export function isOver(job: Pick<Job, "state">): boolean {
  return ENDED.includes(job.state);
}

/** Returns why a job that needs a person is in its state. */
export function problemOf({ state, reason }: Pick<Job, "state" | "reason">): string | null {
  return ["paused", "failed", "cancelled"].includes(state) ? (reason ?? null) : null;
}

/** Jobs, newest first. The stream keeps them up to date. */
export function useOverview() {
  return useQuery({
    queryKey: OVERVIEW,
    queryFn: async () =>
      body(await api.GET("/api/v1/overview", { params: { query: { limit: LIST_LIMIT } } })),
    refetchInterval: usePolling(),
  });
}

function costQuery(job: string) {
  return {
    queryKey: ["job", job, "cost"],
    queryFn: async () => body(await api.GET("/api/v1/jobs/{job}/cost", at(job))),
  };
}

export function useCost(job: string) {
  return useQuery({ ...costQuery(job), refetchInterval: usePolling() });
}

function jobQuery(job: string) {
  return {
    queryKey: ["job", job, "view"],
    queryFn: async () => body(await api.GET("/api/v1/jobs/{job}", at(job))),
  };
}

function metricsQuery(job: string) {
  return {
    queryKey: ["job", job, "metrics"],
    queryFn: async () =>
      body(
        await api.GET("/api/v1/jobs/{job}/metrics", {
          params: { path: { job }, query: { points: POINTS, names: SERIES } },
        }),
      ),
  };
}

export function useJob(job: string) {
  return useQuery({ ...jobQuery(job), refetchInterval: usePolling() });
}

export function useMetrics(job: string) {
  return useQuery({ ...metricsQuery(job), refetchInterval: usePolling() });
}

/** Several jobs, with the metrics and the cost of each, in the same order. */
export function useSeveral(jobs: string[]) {
  const refetchInterval = usePolling();
  return {
    views: useQueries({ queries: jobs.map((job) => ({ ...jobQuery(job), refetchInterval })) }),
    metrics: useQueries({
      queries: jobs.map((job) => ({ ...metricsQuery(job), refetchInterval })),
    }),
    costs: useQueries({ queries: jobs.map((job) => ({ ...costQuery(job), refetchInterval })) }),
  };
}

export function useStaleness(job: string) {
  return useQuery({
    queryKey: ["job", job, "staleness"],
    queryFn: async () => body(await api.GET("/api/v1/jobs/{job}/staleness", at(job))),
    refetchInterval: usePolling(),
  });
}

export function useTimelines(job: string) {
  return useQuery({
    queryKey: ["job", job, "machines"],
    queryFn: async () => body(await api.GET("/api/v1/jobs/{job}/timelines", at(job))),
    refetchInterval: usePolling(),
  });
}

export function useSubtasks(job: string) {
  return useQuery({
    queryKey: ["job", job, "subtasks"],
    queryFn: async () =>
      body(
        await api.GET("/api/v1/jobs/{job}/subtasks", {
          params: { path: { job }, query: { letters: SQUARES } },
        }),
      ),
    refetchInterval: usePolling(),
  });
}

export function useJobWorkers(job: string) {
  return useQuery({
    queryKey: ["job", job, "workers"],
    queryFn: async () => body(await api.GET("/api/v1/jobs/{job}/workers", at(job))),
    refetchInterval: usePolling(),
  });
}

export function useCheckpoints(job: string, enabled = true) {
  return useQuery({
    enabled,
    queryKey: ["job", job, "checkpoints"],
    queryFn: async () => body(await api.GET("/api/v1/jobs/{job}/checkpoints", at(job))),
    refetchInterval: usePolling(),
  });
}

/** Spec of a job as YAML; only a new budget changes it. */
export function useSpecText(job: string) {
  return useQuery({
    queryKey: ["job", job, "spec"],
    queryFn: async () =>
      body(await api.GET("/api/v1/jobs/{job}/spec", { ...at(job), parseAs: "text" })) as string,
    staleTime: Number.POSITIVE_INFINITY,
  });
}

/** Command for a job; `budget` is its new total budget in USD. */
export type Command = { name: "pause" | "resume" | "cancel"; budget?: number };

export function useCommand(job: string) {
  const queries = useQueryClient();
  return useMutation({
    mutationFn: async ({ name, budget }: Command) => {
      if (name === "pause") return body(await api.POST("/api/v1/jobs/{job}/pause", at(job)));
      if (name === "cancel") return body(await api.POST("/api/v1/jobs/{job}/cancel", at(job)));
      const change = budget === undefined ? null : { max_cost_usd: budget };
      return body(await api.POST("/api/v1/jobs/{job}/resume", { ...at(job), body: change }));
    },
    onSuccess: (view) => {
      queries.setQueryData(["job", job, "view"], view);
      queries.invalidateQueries({ queryKey: ["job", job, "spec"] });
      queries.invalidateQueries({ queryKey: ["jobs"] });
    },
  });
}

export type Eviction = { machine: string; kill: boolean };

/** Looks at the result of an eviction, and pause between two of them. */
const LOOKS = 60;
const LOOK_MS = 1000;

/**
 * Evicts a machine, with the usual notice of its provider or without notice. Fails if the provider
 * refuses, or if the result is not known in time.
 */
export function useEvict() {
  const queries = useQueryClient();
  return useMutation({
    mutationFn: async ({ machine, kill }: Eviction) => {
      const sent = await api.POST("/api/v1/machines/{machine}/evict", {
        params: { path: { machine } },
        body: { kill, notice_seconds: null },
      });
      let request = body(sent);
      for (let look = 0; look < LOOKS && request.state === "waiting"; look++) {
        await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
        const path = { request: request.id };
        request = body(await api.GET("/api/v1/requests/{request}", { params: { path } }));
      }
      if (request.state === "failed") {
        throw new ApiError(request.problem ?? "The request failed.", 409, request.remedy);
      }
      if (request.state === "waiting") {
        throw new ApiError(`The controller has not answered: ${machine} may end or not.`, 0);
      }
    },
    onSuccess: () => {
      queries.invalidateQueries({ queryKey: ["job"] });
      queries.invalidateQueries({ queryKey: ["fleet"] });
    },
  });
}

function at(job: string) {
  return { params: { path: { job } } };
}
