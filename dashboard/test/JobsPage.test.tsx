import { screen, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { expect, test, vi } from "vitest";
import { LIST_LIMIT } from "../src/api/jobs";
import { JobsPage } from "../src/pages/JobsPage";
import { aBest, aBrief, aCaller, anApi, START, show } from "./factories";

const JOBS = [
  aBrief({ id: "mnist-def456", state: "succeeded", best: aBest("f1", 0.99), ended_at: START + 90 }),
  aBrief({ id: "digits-abc123", owner: "bob", best: aBest("accuracy", 0.912) }),
];

const names = () => screen.getAllByRole("link", { name: /\d{3}$/ }).map((each) => each.textContent);

function anApiWithJobs() {
  anApi({ "/api/v1/overview": { body: JOBS } });
}

test("a row shows state, owner, progress, workers, cost and savings", async () => {
  anApiWithJobs();
  show(<JobsPage />);

  const row = (await screen.findByRole("link", { name: /digits/ })).closest("tr");
  const cells = within(row as HTMLElement);
  await cells.findByText("70%");
  expect(cells.getByText("running")).toBeTruthy();
  expect(cells.getByText("bob")).toBeTruthy();
  expect(cells.getByRole("progressbar").getAttribute("aria-valuenow")).toBe("34");
  expect(cells.getByText("91.2%")).toBeTruthy();
  expect(cells.getByText("$0.30")).toBeTruthy();
  const other = within(screen.getByRole("link", { name: /mnist/ }).closest("tr") as HTMLElement);
  expect(other.getByText("f1")).toBeTruthy();
  expect(other.getByText("0.99")).toBeTruthy();
});

test("savings have no column if no machine has a second price", async () => {
  anApi({ "/api/v1/overview": { body: [aBrief({ on_demand_usd: 0 })] } });
  show(<JobsPage />);

  await screen.findByRole("link", { name: /digits/ });
  expect(screen.queryByText("Saved")).toBeNull();
});

test("a job that waits for machines says for how many, and why", async () => {
  const waiting = "2 machines are booting; position 1 of 1: waits for 1 of 3 machines";
  anApi({ "/api/v1/overview": { body: [aBrief({ waiting })] } });
  show(<JobsPage />);

  const text = await screen.findByText("2 machines are booting");
  expect(text.title).toBe(waiting);
});

test("a job that failed says why, and one that succeeded needs no reason", async () => {
  const [failed, succeeded] = ["no space left", "all epochs are done"];
  anApi({
    "/api/v1/overview": {
      body: [
        aBrief({ id: "digits-abc123", state: "failed", reason: failed }),
        aBrief({ id: "mnist-def456", state: "succeeded", reason: succeeded }),
      ],
    },
  });
  show(<JobsPage />);

  expect(await screen.findByText(failed)).toBeTruthy();
  expect(screen.queryByText(succeeded)).toBeNull();
});

test("active jobs come first, and an age is the time since the submission", async () => {
  vi.spyOn(Date, "now").mockReturnValue((START + 7200) * 1000);
  anApiWithJobs();
  show(<JobsPage />);

  await screen.findByRole("link", { name: /digits/ });
  expect(names()).toEqual(["digits abc123", "mnist def456"]);
  const ended = screen.getByRole("link", { name: /mnist/ }).closest("tr") as HTMLElement;
  expect(within(ended).getByText("2 h")).toBeTruthy();
  vi.restoreAllMocks();
});

test("jobs can be searched by name and sorted by their best value", async () => {
  anApiWithJobs();
  show(<JobsPage />);
  await screen.findByRole("link", { name: /digits/ });

  await userEvent.click(screen.getByRole("button", { name: "Best" }));
  await userEvent.click(screen.getByRole("button", { name: "Best" }));
  expect(names()).toEqual(["mnist def456", "digits abc123"]);

  await userEvent.type(screen.getByLabelText("Search by name"), "dig");
  expect(names()).toEqual(["digits abc123"]);
  expect(screen.getByText("1 of 2 jobs")).toBeTruthy();

  await userEvent.type(screen.getByLabelText("Search by name"), "zzz");
  expect(screen.getByText("No matching jobs")).toBeTruthy();
});

test("a list that may lack older jobs says so", async () => {
  const jobs = Array.from({ length: LIST_LIMIT }, (_, number) =>
    aBrief({ id: `digits-${String(number).padStart(6, "0")}` }),
  );
  anApi({ "/api/v1/overview": { body: jobs } });
  show(<JobsPage />);

  expect(await screen.findByText("newest 500 jobs")).toBeTruthy();
});

test("ticked jobs can be compared", async () => {
  anApiWithJobs();
  show(<JobsPage />);

  await userEvent.click(await screen.findByLabelText("Compare digits-abc123"));
  expect(screen.queryByRole("link", { name: /^Compare/ })).toBeNull();
  await userEvent.click(screen.getByLabelText("Compare mnist-def456"));

  const link = screen.getByRole("link", { name: "Compare 2 jobs" });
  expect(link.getAttribute("href")).toBe("/compare?jobs=digits-abc123,mnist-def456");
});

test("an empty list shows how to submit a job", async () => {
  anApi({ "/api/v1/overview": { body: [] } });
  show(<JobsPage />);
  expect(await screen.findByText("No jobs yet")).toBeTruthy();
});

test("a token that may only read is told why it can't submit", async () => {
  anApi({ "/api/v1/overview": { body: JOBS }, "/api/v1/me": { body: aCaller("read", "eve") } });
  show(<JobsPage />);

  const button = await screen.findByRole("button", { name: "Submit a job" });
  await userEvent.hover(button);

  expect(await screen.findByText(/scope submit; eve has scope read/)).toBeTruthy();
  expect(screen.queryByRole("link", { name: "Submit a job" })).toBeNull();
});

test("an error shows the API's message and remedy", async () => {
  const problem = { detail: "the token is wrong", remedy: "send another one" };
  anApi({ "/api/v1/overview": { status: 422, body: problem } });
  show(<JobsPage />);
  expect(await screen.findByText("the token is wrong")).toBeTruthy();
  expect(screen.getByText("send another one")).toBeTruthy();
});
