import { screen } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { expect, test } from "vitest";
import { Actions } from "../src/pages/job/Actions";
import { aCost, aJob, anApi, show } from "./factories";

test.each([
  ["running", ["Pause", "Cancel"]],
  ["paused", ["Resume", "Cancel"]],
  ["starting", ["Cancel"]],
  ["failed", []],
] as const)("a job that is %s offers %s", (state, names) => {
  show(<Actions job={aJob({ state })} />);
  expect(screen.queryAllByRole("button").map((each) => each.textContent)).toEqual(names);
});

test("a job with an exhausted budget resumes with a new one", async () => {
  const paused = aJob({ state: "paused" });
  const job = { ...paused, spec: { ...paused.spec, stop: { max_cost_usd: 2 } } } as typeof paused;
  const requests = anApi({
    "/api/v1/jobs/digits-abc123/cost": { body: aCost(job.id, { spent_usd: 1.99 }) },
    "/api/v1/jobs/digits-abc123/resume": { body: job },
  });
  show(<Actions job={job} />);

  await userEvent.click(screen.getByRole("button", { name: "Resume" }));
  const budget = await screen.findByLabelText("Total budget in USD");
  await userEvent.clear(budget);
  await userEvent.type(budget, "1");
  expect(await screen.findByText("The job has already spent $1.99")).toBeTruthy();
  await userEvent.clear(budget);
  await userEvent.type(budget, "5");
  await userEvent.click(screen.getByRole("button", { name: "Resume the job" }));

  const sent = requests.find((each) => each.method === "POST");
  expect(await sent?.clone().json()).toEqual({ max_cost_usd: 5 });
});

test("a finished model can be downloaded", () => {
  show(<Actions job={aJob({ state: "succeeded", model: "v1.safetensors" })} />);
  const link = screen.getByRole("link", { name: "Download model" });
  expect(link.getAttribute("href")).toBe("/api/v1/jobs/digits-abc123/model");
});

test("cancelling asks for confirmation and sends the request header", async () => {
  const requests = anApi({ "/api/v1/jobs": { body: aJob({ state: "cancelled" }) } });
  show(<Actions job={aJob()} />);

  await userEvent.click(screen.getByRole("button", { name: "Cancel" }));
  expect(requests).toHaveLength(0);
  await userEvent.click(await screen.findByRole("button", { name: "Cancel the job" }));

  expect(requests.map((each) => `${each.method} ${new URL(each.url).pathname}`)).toEqual([
    "POST /api/v1/jobs/digits-abc123/cancel",
  ]);
  expect(requests[0]?.headers.get("X-Vcasgd-Request")).toBe("dashboard");
});
