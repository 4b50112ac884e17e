import { cleanup, configure } from "@testing-library/react";
import { afterEach, beforeEach, vi } from "vitest";
import { setReachable } from "../src/api/reachable";

// Browser APIs that components use and jsdom lacks.
vi.stubGlobal(
  "ResizeObserver",
  class {
    observe() {}
    unobserve() {}
    disconnect() {}
  },
);
vi.stubGlobal("matchMedia", (query: string) => ({
  matches: false,
  media: query,
  addEventListener() {},
  removeEventListener() {},
}));
// The editor asks where text is.
Range.prototype.getClientRects = () => document.createElement("i").getClientRects();

// Tests must not fail on a busy machine.
configure({ asyncUtilTimeout: 10_000 });

// An API without data, for tests without one of their own.
beforeEach(() => {
  vi.stubGlobal("fetch", async () => new Response("{}", { status: 404 }));
  setReachable(true);
});

afterEach(() => {
  cleanup();
});
