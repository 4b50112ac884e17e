import { screen, waitFor } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { expect, test } from "vitest";
import SubmitPage from "../src/pages/SubmitPage";
import { aCaller, aJob, anApi, aPlan, show } from "./factories";

const INVALID = { valid: false, errors: [{ path: "name", message: "is required" }], warnings: [] };
const VALID = { valid: true, errors: [], warnings: [], spec: aJob().spec };

async function reason(): Promise<string | undefined> {
  const button = screen.getByRole("button", { name: "Submit the job" });
  await userEvent.hover(button);
  const text = (await screen.findByRole("tooltip")).textContent;
  await userEvent.unhover(button);
  return text ?? undefined;
}

test.each([
  [INVALID, "The job file must be valid first."],
  [VALID, "Choose the working directory first."],
])("the button says why it can't submit the job yet", async (body, text) => {
  anApi({
    "/api/v1/jobs/validate": { body },
    "/api/v1/me": { body: aCaller("admin") },
    "/api/v1/schema/job": { body: {} },
    "/api/v1/plan": { body: aPlan() },
  });
  show(<SubmitPage />);
  await waitFor(async () => expect(await reason()).toBe(text));
});
