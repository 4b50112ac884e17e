import { screen, within } from "@testing-library/react";
import { expect, test, vi } from "vitest";
import { Overview } from "../src/pages/job/Overview";
import { Summary } from "../src/pages/job/Summary";
import { aJob, anApi, aTimeline, START, show } from "./factories";

const EVICTED = aTimeline(
  "i-0123456789abcdef0",
  [
    { state: "running", from: START, to: START + 50 },
    { state: "notice", from: START + 50, to: START + 60 },
    { state: "dead", from: START + 60, to: null },
  ],
  { lost: true, machine_type: "g5.xlarge", zone: "us-east-1b", price_per_hour: 0.42 },
);
const METRICS = [
  { at: START + 1, loss: 2, samples: 0 },
  { at: START + 100, loss: 0.05, samples: 900 },
];

test("a lane shows type, zone, price, and how the machine ended", async () => {
  anApi({ "/api/v1/jobs/digits-abc123/timelines": { body: [EVICTED] } });
  show(<Overview job={aJob({ ended_at: START + 120, state: "succeeded" })} />);

  const lane = await screen.findByText("g5.xlarge · us-east-1b · $0.42/h");
  const row = within(lane.closest("li") as HTMLElement);
  expect(row.getByText("evicted")).toBeTruthy();
  expect(screen.getByText("1 so far, 1 evicted")).toBeTruthy();
});

test("a loss is marked on the curve at its time, and a logarithmic axis says so", async () => {
  anApi({
    "/api/v1/jobs/digits-abc123/timelines": { body: [EVICTED] },
    "/api/v1/jobs/digits-abc123/metrics": { body: METRICS },
  });
  show(<Overview job={aJob({ ended_at: START + 120, state: "succeeded" })} />);

  const figure = (await screen.findByText("Training loss")).closest("figure") as HTMLElement;
  expect(within(figure).getByText("log scale")).toBeTruthy();
  const mark = await within(figure).findByTitle("i-0123456789abcdef0: evicted");
  expect(mark.style.left).toBe("50%");
});

test("parts of the page without content are one line each", async () => {
  anApi({ "/api/v1/jobs/digits-abc123/timelines": { body: [] } });
  const { container } = show(<Overview job={aJob()} />);

  expect(await screen.findByText("None: all updates were valid.")).toBeTruthy();
  const empty = [...container.querySelectorAll("[data-empty] h2")];
  expect(empty.map((each) => each.textContent)).toEqual([
    "Training",
    "Machines",
    "Parts of the epoch",
    "Staleness",
    "Updates per second",
    "Rejected updates",
  ]);
  expect(container.querySelectorAll("[data-empty] > :not(header)")).toHaveLength(0);
});

test("nothing is said about what has not been answered yet", async () => {
  vi.stubGlobal("fetch", () => new Promise(() => {}));
  show(
    <>
      <Summary job={aJob()} />
      <Overview job={aJob()} />
    </>,
  );

  expect(await screen.findAllByText("Loading…")).toHaveLength(5);
  for (const text of [/no updates yet/i, /machines start/i, /known when/i, /no prices/i])
    expect(screen.queryByText(text)).toBeNull();
});
