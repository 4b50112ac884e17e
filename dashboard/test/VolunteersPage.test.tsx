import { screen, within } from "@testing-library/react";
import { expect, test } from "vitest";
import type { PublicJob } from "../src/api/types";
import VolunteersPage from "../src/pages/VolunteersPage";
import { anApi, show } from "./factories";

const PATH = "/api/v1/public/volunteers";
const JOB: PublicJob = {
  title: "Digits for everyone",
  description: "A small network reads digits.",
  state: "running",
  progress: 0.34,
  samples: 3400,
  total_samples: 10_000,
  evaluation: { metric: "accuracy", value: 0.912, epoch: 3, at: 1_700_000_000 },
  machines: 4,
  contributions: [
    { nickname: "Night Owl", samples: 2040, share: 0.6 },
    { nickname: null, samples: 340, share: 0.1 },
  ],
  own_samples: 1020,
};

test("the page shows what is trained, how far it is, and who helps", async () => {
  anApi({ [PATH]: { body: { jobs: [JOB] } } });
  show(<VolunteersPage />);

  await screen.findByRole("heading", { name: JOB.title });
  const bar = screen.getByRole("progressbar", { name: "Progress" });
  expect(bar.getAttribute("aria-valuenow")).toBe("34");
  expect(screen.getByText("Latest accuracy").nextSibling?.textContent).toBe("91.2%");
  expect(screen.getByText("Machines now").nextSibling?.textContent).toBe("4");
  const rows = within(screen.getByRole("table")).getAllByRole("row").slice(1);
  expect(rows.map((row) => row.textContent)).toEqual(["Night Owl2,04060.0%", "anonymous34010.0%"]);
  expect(screen.getByText(/The other 1,020 samples/)).toBeTruthy();
});

test("text of strangers is shown as text", async () => {
  const nickname = "<img src=x onerror=alert(1)>";
  const contributions = [{ nickname, samples: 1, share: 1 }];
  anApi({ [PATH]: { body: { jobs: [{ ...JOB, title: "<b>x</b>", contributions }] } } });
  show(<VolunteersPage />);

  await screen.findByText(nickname);
  expect(screen.getByRole("heading", { name: "<b>x</b>" })).toBeTruthy();
  expect(document.querySelector("table img")).toBeNull();
});

test.each([
  ["without public jobs", { jobs: [] }, /Nothing is trained in public/],
  ["without volunteers", { jobs: [{ ...JOB, contributions: [] }] }, /No volunteer has contributed/],
])("%s, the page says so", async (_, body, text) => {
  anApi({ [PATH]: { body } });
  show(<VolunteersPage />);

  expect(await screen.findByText(text)).toBeTruthy();
});

test("a cluster without a public page says so, and how to open one", async () => {
  anApi({ [PATH]: { status: 404, body: { detail: "this cluster has no public page" } } });
  show(<VolunteersPage />);

  expect(await screen.findByText("This cluster has no public page for volunteers")).toBeTruthy();
  expect(screen.getByText("VCASGD_PUBLIC_PAGE=true")).toBeTruthy();
});
