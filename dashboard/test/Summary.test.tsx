import { screen, within } from "@testing-library/react";
import { expect, test } from "vitest";
import type { Job } from "../src/api/types";
import { Summary } from "../src/pages/job/Summary";
import { aCost, aJob, anApi, show } from "./factories";

/** Texts of a figure: its value and its note. */
async function figure(job: Job, label: string): Promise<string[]> {
  anApi({
    "/api/v1/jobs/digits-abc123/cost": { body: aCost(job.id) },
    "/api/v1/jobs/digits-abc123/workers": { body: [] },
  });
  show(<Summary job={job} />);
  const name = await screen.findByText(label);
  const values = within(name.parentElement as HTMLElement).getAllByRole("definition");
  return values.map((each) => each.textContent ?? "");
}

test("the summary shows the best epoch by its metric, and the goal", async () => {
  const job = aJob();
  const goal = { ...job, spec: { ...job.spec, stop: { accuracy: 0.95 } } } as Job;
  expect(await figure(goal, "Best accuracy")).toEqual(["91.2%", "epoch 3, goal 95.0%"]);
});

test("the best model can be between epochs and ranked by another metric", async () => {
  const place = { epoch: 2.4666, samples: 19_200, step: 1200 };
  const best = { ...place, metric: "loss", mode: "min", value: 0.123456 } as const;
  expect(await figure(aJob({ best }), "Best loss")).toEqual(["0.1235", "epoch 2.47, step 1,200"]);
});

test("without an evaluation there is no best epoch", async () => {
  expect(await figure(aJob({ best: null }), "Best accuracy")).toEqual(["–", "on validation data"]);
});

test("the summary shows the bytes in both directions", async () => {
  expect(await figure(aJob(), "Pushed")).toEqual(["1.2 GB", "3.4 GB fetched"]);
});
