import { screen } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { expect, test } from "vitest";
import { usePlan } from "../src/api/submitting";
import type { Spec } from "../src/api/types";
import { PlanPanel } from "../src/pages/submit/PlanPanel";
import { aJob, anApi, aPlan, show } from "./factories";

const SPEC = aJob().spec as Spec;
const NO_POOLS = {
  status: 409,
  body: { title: "Conflict", status: 409, detail: "no controller has told which pools there are" },
};

function Asking() {
  const plan = usePlan();
  const ask = (known: object) => plan.mutate({ spec: SPEC, ...known });
  return <PlanPanel plan={plan} refusal={null} onPlan={ask} action={null} />;
}

async function ask() {
  show(<Asking />);
  await userEvent.click(screen.getByRole("button", { name: "Show the plan" }));
}

test("a plan is retried until the controller has published its pools", async () => {
  const requests = anApi({ "/api/v1/plan": [NO_POOLS, { body: aPlan() }] });

  await ask();

  expect(await screen.findByText("$0.30")).toBeTruthy();
  expect(screen.getByText("30 min")).toBeTruthy();
  expect(requests).toHaveLength(2);
});

test("what nothing has measured can be entered", async () => {
  const unknown = aPlan({ hours: null, cost_usd: null, remedies: ["the speed is unknown"] });
  const requests = anApi({ "/api/v1/plan": [{ body: unknown }, { body: aPlan() }] });
  await ask();

  await userEvent.type(await screen.findByLabelText("Samples in an epoch"), "50000");
  await userEvent.click(screen.getByRole("button", { name: "Estimate again" }));

  expect(await screen.findByText("30 min")).toBeTruthy();
  expect(await requests[1]?.json()).toMatchObject({ samples: 50_000 });
});

test("an invalid job is not retried by itself", async () => {
  const problem = { title: "Invalid", status: 422, detail: "no such rule", remedy: "choose sma" };
  const requests = anApi({
    "/api/v1/plan": [{ status: 422, body: problem }, { body: aPlan() }],
  });

  await ask();

  expect(await screen.findByText("no such rule (choose sma)")).toBeTruthy();
  expect(requests).toHaveLength(1);
  await userEvent.click(screen.getByRole("button", { name: "Try again" }));
  expect(await screen.findByText("30 min")).toBeTruthy();
});

test("excluded pools are listed with their reasons", async () => {
  const pools = [
    { pool: "eu", usable: true, reasons: [] },
    { pool: "us", usable: false, reasons: ["may not see eu-only", "refused lately"] },
  ];
  anApi({ "/api/v1/plan": { body: aPlan({ pools }) } });

  await ask();

  expect(
    await screen.findByText("pool us excluded: may not see eu-only; refused lately"),
  ).toBeTruthy();
  expect(screen.queryByText(/eu excluded/)).toBeNull();
});

test.each([
  [{ costs_money: false, usd_per_hour: 0.6 }, ["Cost (simulated)", "$0.30", "$0.60"], "free"],
  [{ costs_money: false, usd_per_hour: 0, cost_usd: 0 }, ["Cost", "free"], /\$/],
  [{ costs_money: true }, ["Cost", "$0.30", "$0.60"], "free"],
])("a plan is either free or has prices, and says which are simulated", async (plan, texts, no) => {
  anApi({ "/api/v1/plan": { body: aPlan(plan) } });

  await ask();

  for (const text of texts) expect((await screen.findAllByText(text)).length).toBeGreaterThan(0);
  expect(screen.queryByText(no)).toBeNull();
});
