import { act, screen } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { setReachable, setUnavailable } from "../src/api/reachable";
import { GuardedButton } from "../src/components/GuardedButton";
import { useNow } from "../src/lib/useNow";
import { show } from "./factories";

beforeEach(() => {
  vi.useFakeTimers({ shouldAdvanceTime: true });
});

afterEach(() => {
  vi.advanceTimersByTime(60_000);
  setReachable(true);
  vi.useRealTimers();
});

function Clock() {
  return <time>{Math.floor(useNow())}</time>;
}

const shown = () => Number(document.querySelector("time")?.textContent);

test("clocks stand while the API can't be reached, and go on after", () => {
  show(<Clock />);
  const started = shown();
  act(() => vi.advanceTimersByTime(5_000));
  expect(shown()).toBeGreaterThanOrEqual(started + 5);

  act(() => setReachable(false));
  const lost = shown();
  act(() => vi.advanceTimersByTime(60_000));
  expect(shown()).toBe(lost);

  act(() => setReachable(true));
  expect(shown()).toBeGreaterThanOrEqual(lost + 60);
});

test("buttons can't be pressed while the API can't be reached, and say why", async () => {
  const pressed = vi.fn();
  show(
    <GuardedButton refusal={null} onClick={pressed}>
      Pause
    </GuardedButton>,
  );
  act(() => setReachable(false));

  const button = screen.getByRole("button", { name: "Pause" });
  await userEvent.setup({ advanceTimers: vi.advanceTimersByTime }).click(button);

  expect(button.getAttribute("aria-disabled")).toBe("true");
  expect(pressed).not.toHaveBeenCalled();
  expect(await screen.findByText("The API can't be reached.")).toBeTruthy();
});

test("a stack with a problem is shown with it, and other answers don't hide it", () => {
  show(<GuardedButton refusal={null}>Pause</GuardedButton>);
  act(() => setUnavailable("the disk of /srv is full", "free space on it"));
  act(() => setReachable(true));
  expect(screen.getByRole("button").getAttribute("aria-disabled")).toBe("true");

  act(() => {
    vi.advanceTimersByTime(10_000);
    setReachable(true);
  });
  expect(screen.getByRole("button").getAttribute("aria-disabled")).toBeNull();
});
