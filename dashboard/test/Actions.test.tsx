import { screen } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { expect, test } from "vitest";
import { Actions } from "../src/pages/job/Actions";
import { aJob, anApi, show } from "./factories";

test.each([
  ["running", ["Pause", "Cancel"]],
  ["paused", ["Resume", "Cancel"]],
  ["starting", ["Cancel"]],
  ["failed", []],
] as const)("a job that is %s offers %s", (state, names) => {
  show(<Actions job={aJob({ state })} />);
  expect(screen.queryAllByRole("button").map((each) => each.textContent)).toEqual(names);
});

test("a finished model can be downloaded", () => {
  show(<Actions job={aJob({ state: "succeeded", model: "v1.safetensors" })} />);
  const link = screen.getByRole("link", { name: "Download model" });
  expect(link.getAttribute("href")).toBe("/api/v1/jobs/digits-abc123/model");
});

test("a job is cancelled only after a question, with the header that marks our own requests", async () => {
  const asked = anApi({ "/api/v1/jobs": { body: aJob({ state: "cancelled" }) } });
  show(<Actions job={aJob()} />);

  await userEvent.click(screen.getByRole("button", { name: "Cancel" }));
  expect(asked).toHaveLength(0);
  await userEvent.click(await screen.findByRole("button", { name: "Cancel the job" }));

  expect(asked.map((each) => `${each.method} ${new URL(each.url).pathname}`)).toEqual([
    "POST /api/v1/jobs/digits-abc123/cancel",
  ]);
  expect(asked[0]?.headers.get("X-Vcasgd-Request")).toBe("dashboard");
});
