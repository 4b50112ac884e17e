import { Notifications } from "@mantine/notifications";
import { screen, waitFor } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { expect, test } from "vitest";
import { Actions } from "../src/pages/job/Actions";
import { aCaller, aCost, aJob, anApi, show } from "./factories";

test.each([
  ["running", ["Pause", "Cancel"]],
  ["paused", ["Resume", "Cancel"]],
  ["starting", ["Cancel"]],
  ["failed", []],
] as const)("a job that is %s offers %s", (state, names) => {
  show(<Actions job={aJob({ state })} />);
  expect(screen.queryAllByRole("button").map((each) => each.textContent)).toEqual(names);
});

test.each([
  [aCaller("read"), "This needs a token with scope submit; ann has scope read."],
  [
    aCaller("submit", "bob"),
    "The job belongs to ann; jobs of others need a token with scope admin.",
  ],
])("a token that may not change a job is told why", async (caller, reason) => {
  const requests = anApi({ "/api/v1/me": { body: caller } });
  show(<Actions job={aJob()} />);

  for (const name of ["Pause", "Cancel"]) {
    const disabled = () => screen.getByRole("button", { name }).getAttribute("aria-disabled");
    await waitFor(() => expect(disabled()).toBe("true"));
    await userEvent.click(screen.getByRole("button", { name }));
    expect((await screen.findAllByText(reason)).length).toBeGreaterThan(0);
  }
  expect(requests.filter((each) => each.method === "POST")).toEqual([]);
  expect(screen.queryByRole("dialog")).toBeNull();
});

test.each([aCaller("submit"), aCaller("admin", "bob")])(
  "$name with scope $scope may",
  async (caller) => {
    const requests = anApi({ "/api/v1/me": { body: caller }, "/api/v1/jobs": { body: aJob() } });
    show(<Actions job={aJob()} />);
    await waitFor(() => expect(requests.length).toBe(1));

    await userEvent.click(screen.getByRole("button", { name: "Pause" }));

    await waitFor(() => expect(requests.some((each) => each.method === "POST")).toBe(true));
  },
);

test("a refused command is shown with its remedy", async () => {
  const detail = "job digits-abc123 is starting";
  const refused = { status: 409, body: { detail, remedy: "wait until it runs" } };
  anApi({ "/api/v1/jobs/digits-abc123/pause": refused });
  show(
    <>
      <Notifications />
      <Actions job={aJob()} />
    </>,
  );

  await userEvent.click(screen.getByRole("button", { name: "Pause" }));

  expect(await screen.findByText(`${detail} (wait until it runs)`)).toBeTruthy();
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

const BEST = { name: "v7", version: 7, best: true, last: false, metrics: { accuracy: 0.989 } };
const LAST = { name: "v9", version: 9, best: false, last: true, metrics: { accuracy: 0.976 } };

test.each([
  [
    [BEST, LAST],
    ["Download best (98.9%)", "Download last (97.6%)"],
  ],
  [[{ ...LAST, best: true }], ["Download best (97.6%)", "Download last (97.6%)"]],
  [[{ ...LAST, metrics: null }], ["Download last"]],
])("the best and the last model can be downloaded", async (checkpoints, names) => {
  anApi({ "/api/v1/jobs/digits-abc123/checkpoints": { body: checkpoints } });
  show(<Actions job={aJob({ state: "succeeded", model: "v9" })} />);

  await screen.findByRole("link", { name: names[0] as string });

  const links = screen.getAllByRole("link");
  expect(links.map((each) => each.textContent)).toEqual(names);
  expect(links.at(-1)?.getAttribute("href")).toBe("/api/v1/jobs/digits-abc123/checkpoints/last");
});

test("cancelling asks for confirmation and sends the request header", async () => {
  const requests = anApi({ "/api/v1/jobs": { body: aJob({ state: "cancelled" }) } });
  const sent = () => requests.filter((each) => each.method === "POST");
  show(<Actions job={aJob()} />);

  await userEvent.click(screen.getByRole("button", { name: "Cancel" }));
  expect(sent()).toHaveLength(0);
  await userEvent.click(await screen.findByRole("button", { name: "Cancel the job" }));

  expect(sent().map((each) => `${each.method} ${new URL(each.url).pathname}`)).toEqual([
    "POST /api/v1/jobs/digits-abc123/cancel",
  ]);
  expect(sent()[0]?.headers.get("X-Vcasgd-Request")).toBe("dashboard");
});
