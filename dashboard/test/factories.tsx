import { MantineProvider } from "@mantine/core";
import { QueryClientProvider } from "@tanstack/react-query";
import { render } from "@testing-library/react";
import type { ReactNode } from "react";
import { MemoryRouter } from "react-router";
import { vi } from "vitest";
import { makeQueryClient } from "../src/api/cache";
import type {
  Brief,
  Caller,
  Cost,
  Job,
  Machine,
  MachineTimeline,
  Plan,
  Span,
} from "../src/api/types";

export const START = 1_700_000_000;

export function aJob(changes: Partial<Job> = {}): Job {
  const id = changes.id ?? "digits-abc123";
  return {
    id,
    name: id.split("-")[0] ?? id,
    state: "running",
    reason: null,
    notes: [],
    warnings: [],
    traceback: null,
    created_at: START,
    started_at: START,
    ended_at: null,
    spec: { name: "digits", task: "train:Digits", epochs: 10, subtasks_per_epoch: 4 },
    progress: {
      epochs: 10,
      finished_epochs: 3,
      subtasks_total: 40,
      samples_expected: 1000,
      samples_applied: 340,
      samples_skipped: 0,
      samples_repeated: 0,
      samples_lost: null,
      fraction: 0.34,
    },
    totals: { updates: 17, staleness_mean: 1.5, staleness_max: 4, rejected: {} },
    traffic: { pushed_bytes: 1_200_000_000, fetched_bytes: 3_400_000_000 },
    evaluations: [],
    best: { epoch: 3, samples: 3000, step: 47, metric: "accuracy", mode: "max", value: 0.912 },
    version: 17,
    model: null,
    package: "0".repeat(64),
    owner: "ann",
    evictions: 0,
    kills: 0,
    store_nodes: 1,
    tuned: { shares: {}, implicit_momentum: 0, mixing: 1, learners: {} },
    ...changes,
  } as Job;
}

export function aBrief(changes: Partial<Brief> = {}): Brief {
  const id = changes.id ?? "digits-abc123";
  return {
    id,
    name: id.split("-")[0] ?? id,
    owner: "ann",
    created_at: START,
    ended_at: null,
    state: "running",
    status: changes.state ?? "running",
    reason: null,
    waiting: null,
    queue: null,
    finished_epochs: 3,
    fraction: 0.34,
    version: 17,
    updates: 17,
    accuracy: 0.91,
    best: null,
    workers: 1,
    max_workers: 4,
    evictions: 0,
    kills: 0,
    spent_usd: 0.3,
    on_demand_usd: 1,
    ...changes,
  };
}

export function aBest(metric: string, value: number): NonNullable<Brief["best"]> {
  return { epoch: 3, samples: 3000, step: 47, metric, mode: "max", value };
}

export function aCaller(scope: Caller["scope"], name = "ann"): Caller {
  return { name, scope, max_machines: null, max_usd_per_month: null, expires_at: null };
}

export function aMachine(id: string, state = "running"): Machine {
  return { id, state } as Machine;
}

export function aCost(job: string, changes: Partial<Cost> = {}): Cost {
  const waste = { seconds: 0, usd: 0 };
  return {
    job,
    spent_usd: 0.3,
    on_demand_usd: 1,
    saved_usd: 0.7,
    max_cost_usd: null,
    machine_seconds: 3600,
    pools: [],
    wasted: { booting: waste, idle: waste, lost_work: waste },
    ...changes,
  };
}

export function aTimeline(
  machine: string,
  spans: Span[],
  changes: Partial<MachineTimeline> = {},
): MachineTimeline {
  return {
    machine,
    pool: "local",
    zone: "local",
    machine_type: "process",
    spot: true,
    price_per_hour: 0.3,
    replaced_by: null,
    reason: null,
    lost: false,
    given_to: null,
    spans,
    ...changes,
  };
}

export function aPlan(changes: Partial<Plan> = {}): Plan {
  return {
    machines: 2,
    usd_per_hour: 0.6,
    on_demand_usd_per_hour: 2,
    hours: 0.5,
    cost_usd: 0.3,
    on_demand_cost_usd: 1,
    start_seconds: null,
    costs_money: true,
    traffic: null,
    deadline: null,
    offers: [],
    pools: [],
    assumptions: ["prices stay"],
    remedies: [],
    ...changes,
  };
}

type Answer = { status?: number; body: unknown };

/** Stubs fetch: the longest matching path answers with the next of its answers, and repeats the
 * last one. Returns the list of requests. */
export function anApi(answers: Record<string, Answer | Answer[]>): Request[] {
  const requests: Request[] = [];
  const paths = Object.keys(answers).sort((a, b) => b.length - a.length);
  vi.stubGlobal("fetch", async (input: Request) => {
    requests.push(input);
    const { pathname } = new URL(input.url);
    const match = paths.find((path) => pathname.startsWith(path));
    const { status, body } = (match && next(answers[match])) || { status: 404, body: {} };
    return new Response(JSON.stringify(body), {
      status: status ?? 200,
      headers: { "Content-Type": "application/json" },
    });
  });
  return requests;
}

function next(answers: Answer | Answer[] | undefined): Answer | undefined {
  if (!Array.isArray(answers)) return answers;
  return answers.length > 1 ? answers.shift() : answers[0];
}

export function show(page: ReactNode) {
  return render(
    <MantineProvider env="test">
      <QueryClientProvider client={makeQueryClient()}>
        <MemoryRouter>{page}</MemoryRouter>
      </QueryClientProvider>
    </MantineProvider>,
  );
}
