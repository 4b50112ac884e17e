import { screen } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { expect, test, vi } from "vitest";
import { Events } from "../src/pages/job/Events";
import { Logs } from "../src/pages/job/Logs";
import { aJob, anApi, START, show } from "./factories";

/** Pages of an API with as many events, each with another number, and then none. */
const pagesOf = (events: number) =>
  Array.from({ length: Math.ceil(events / 1000) + 1 }, (_, page) => ({
    body: Array.from({ length: Math.min(1000, Math.max(0, events - page * 1000)) }, (_, index) => ({
      id: `${page}-${index}`,
      at: START,
      kind: "evicted",
      text: `machine ${page}-${index}.`,
    })),
  }));

test.each([
  [5, "5"],
  [2500, "the newest 300 of 2,000, among the job's last 2,000"],
])("of %i events the tab says which it shows", async (number, note) => {
  anApi({ "/api/v1/jobs/": pagesOf(number) });
  show(<Events job={aJob()} />);
  await screen.findByText(note);
});

test("a search says that it covers the last events only", async () => {
  anApi({ "/api/v1/jobs/": pagesOf(2500) });
  show(<Events job={aJob()} />);
  await screen.findByText(/among/);
  await userEvent.type(screen.getByLabelText("Search events"), "1-7.");
  await screen.findByText("1, among the job's last 2,000");
});

test("logs are loading until the stream is open, and not empty", () => {
  class Opening {
    addEventListener() {}
    close() {}
  }
  vi.stubGlobal("EventSource", Opening);
  show(<Logs job={aJob()} />);
  expect(screen.getByText("Loading…")).toBeTruthy();
  expect(screen.queryByText("No output yet")).toBeNull();
});
