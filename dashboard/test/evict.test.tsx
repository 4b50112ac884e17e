import { screen } from "@testing-library/react";
import { expect, test } from "vitest";
import { useEvict } from "../src/api/jobs";
import { anApi, show } from "./factories";

const SENT = { id: "r-1", machine: "i-1", kill: false, notice_seconds: null, state: "waiting" };

function Evict() {
  const evict = useEvict();
  const text = evict.isSuccess ? "done" : (evict.error?.message ?? "nothing yet");
  return (
    <button type="button" onClick={() => evict.mutate({ machine: "i-1", kill: false })}>
      {text}
    </button>
  );
}

test.each([
  [{ ...SENT, state: "failed", problem: "EC2 gives no notice" }, "EC2 gives no notice"],
  [{ ...SENT, state: "done" }, "done"],
])("an eviction shows what became of the request", async (result, text) => {
  anApi({
    "/api/v1/machines/i-1/evict": { status: 202, body: SENT },
    "/api/v1/requests/r-1": { body: result },
  });
  show(<Evict />);

  screen.getByRole("button").click();

  expect(await screen.findByText(text, {}, { timeout: 5000 })).toBeTruthy();
});
