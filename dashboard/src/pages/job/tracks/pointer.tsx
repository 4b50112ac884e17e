import {
  createContext,
  type ReactNode,
  useContext,
  useEffect,
  useMemo,
  useState,
  useSyncExternalStore,
} from "react";

/** Position of the pointer on a horizontal axis, from 0 to 1, or null. */
type Position = number | null;
/** Where a selection began, and where the pointer is. */
type Range = readonly [number, number] | null;

/** Smallest part of the axis that can be selected; less is a click. */
const MIN_RANGE = 0.01;

class Pointer {
  position: Position = null;
  selection: Range = null;
  onSelect: (from: number, to: number) => void = () => {};
  private from: Position = null;
  private readonly listeners = new Set<() => void>();

  subscribe = (listener: () => void) => {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  };

  move(position: Position) {
    if (position === this.position) return;
    this.position = position;
    if (this.from !== null && position !== null) this.selection = [this.from, position];
    this.announce();
  }

  press(position: number) {
    this.from = position;
  }

  release() {
    const chosen = this.selection;
    this.from = null;
    this.selection = null;
    this.announce();
    if (chosen && Math.abs(chosen[1] - chosen[0]) >= MIN_RANGE) this.onSelect(...chosen);
  }

  private announce() {
    for (const listener of this.listeners) listener();
  }
}

const PointerContext = createContext(new Pointer());

/**
 * Shares one crosshair among all tracks inside, and the part of the axis that the user selects by
 * dragging; only the parts that show them are rendered again.
 */
export function SharedPointer({
  children,
  onSelect,
}: {
  children: ReactNode;
  /** Called with two fractions of the axis, in any order. */
  onSelect: (from: number, to: number) => void;
}) {
  const [pointer] = useState(() => new Pointer());
  useEffect(() => {
    pointer.onSelect = onSelect;
  }, [pointer, onSelect]);
  return <PointerContext value={pointer}>{children}</PointerContext>;
}

export function usePointer(): Position {
  const pointer = useContext(PointerContext);
  return useSyncExternalStore(pointer.subscribe, () => pointer.position);
}

export function useSelection(): Range {
  const pointer = useContext(PointerContext);
  return useSyncExternalStore(pointer.subscribe, () => pointer.selection);
}

/** Returns the handlers of an element whose width is that of the axis. */
export function usePointerEvents() {
  const pointer = useContext(PointerContext);
  return useMemo(() => {
    const positionOf = (event: React.PointerEvent) => {
      const { left, width } = event.currentTarget.getBoundingClientRect();
      return (event.clientX - left) / width;
    };
    return {
      onPointerDown: (event: React.PointerEvent) => {
        if (event.button !== 0) return;
        // The drag may end outside.
        event.currentTarget.setPointerCapture(event.pointerId);
        pointer.press(Math.min(1, Math.max(0, positionOf(event))));
      },
      onPointerMove: (event: React.PointerEvent) => {
        const position = positionOf(event);
        pointer.move(position >= 0 && position <= 1 ? position : null);
      },
      onPointerUp: () => pointer.release(),
      onPointerCancel: () => pointer.release(),
      onPointerLeave: () => pointer.move(null),
    };
  }, [pointer]);
}
