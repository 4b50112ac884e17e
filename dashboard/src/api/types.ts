import type { paths } from "./schema";

/** Answer of a GET request by its path. */
type Got<P extends keyof paths> = paths[P] extends {
  get: { responses: { 200: { content: { "application/json": infer T } } } };
}
  ? T
  : never;

type Posted<P extends keyof paths> = paths[P] extends {
  post: { responses: { 200: { content: { "application/json": infer T } } } };
}
  ? T
  : never;

export type SignedIn = Got<"/api/v1/sign-in">;
/** Token of the user. */
export type Caller = Got<"/api/v1/me">;
export type Job = Got<"/api/v1/jobs/{job}">;
export type JobState = Job["state"];
/** Row of the overview. */
export type Brief = Got<"/api/v1/overview">[number];
export type Cost = Got<"/api/v1/jobs/{job}/cost">;
export type Worker = Got<"/api/v1/workers">[number];
export type Machine = Got<"/api/v1/machines">[number];
export type Pool = Got<"/api/v1/pools">[number];
export type Checkpoint = Got<"/api/v1/jobs/{job}/checkpoints">[number];
export type JobEvent = Got<"/api/v1/jobs/{job}/events">[number];
export type LogLine = Got<"/api/v1/jobs/{job}/logs">[number];
export type MetricPoint = Got<"/api/v1/jobs/{job}/metrics">[number];
export type StalenessView = Got<"/api/v1/jobs/{job}/staleness">;
export type MachineTimeline = Got<"/api/v1/jobs/{job}/timelines">[number];
export type Span = MachineTimeline["spans"][number];
export type SubtaskMap = Got<"/api/v1/jobs/{job}/subtasks">;
export type StoreView = Got<"/api/v1/store">;
export type StoreNode = StoreView["nodes"][number];
export type Spend = Got<"/api/v1/fleet/spend">;
export type Validation = Posted<"/api/v1/jobs/validate">;
export type Mistake = Validation["errors"][number];
/** Spec in a request; missing fields have their defaults. */
export type Spec =
  paths["/api/v1/plan"]["post"]["requestBody"]["content"]["application/json"]["spec"];
export type Plan = Posted<"/api/v1/plan">;
