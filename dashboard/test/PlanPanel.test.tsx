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
  return <PlanPanel plan={plan} ready onPlan={() => plan.mutate(SPEC)} action={null} />;
}

async function ask() {
  show(<Asking />);
  await userEvent.click(screen.getByRole("button", { name: "Show the plan" }));
}

test("a plan is asked for again until a controller has told its pools", async () => {
  const asked = anApi({ "/api/v1/plan": [NO_POOLS, { body: aPlan() }] });

  await ask();

  expect(await screen.findByText("$0.30")).toBeTruthy();
  expect(screen.getByText("30 min 0 s")).toBeTruthy();
  expect(asked).toHaveLength(2);
});

test("what is wrong with a job is not asked for again", async () => {
  const refusal = { status: 422, body: { title: "Invalid", status: 422, detail: "no such rule" } };
  const asked = anApi({ "/api/v1/plan": [refusal, { body: aPlan() }] });

  await ask();

  expect(await screen.findByText("no such rule")).toBeTruthy();
  expect(asked).toHaveLength(1);
});

test("pools that fall out are told with the reason", async () => {
  const pools = [
    { pool: "eu", usable: true, reasons: [] },
    { pool: "us", usable: false, reasons: ["may not see eu-only", "refused lately"] },
  ];
  anApi({ "/api/v1/plan": { body: aPlan({ pools }) } });

  await ask();

  expect(await screen.findByText("us falls out: may not see eu-only; refused lately")).toBeTruthy();
  expect(screen.queryByText(/^eu falls out/)).toBeNull();
});
