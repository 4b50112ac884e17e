import { ActionIcon, Tooltip } from "@mantine/core";
import { IconLogout } from "@tabler/icons-react";
import type { ReactNode } from "react";
import { Link, useLocation } from "react-router";
import { useStore } from "../api/cluster";
import { useLive } from "../api/live";
import { useOutage } from "../api/reachable";
import { useCaller, useSignOut } from "../api/signIn";
import type { SignedIn } from "../api/types";
import { clock } from "../lib/format";
import { SECTIONS, sectionOf } from "../lib/places";
import mark from "../mark.svg";
import { Breadcrumbs } from "./Breadcrumbs";
import { Connection } from "./Connection";
import { Notice } from "./Notice";
import classes from "./Shell.module.css";
import { ThemeSwitch } from "./ThemeSwitch";

/** Frame of every page: navigation, connection state, theme, and sign-out. */
export function Shell({ signedIn, children }: { signedIn: SignedIn; children: ReactNode }) {
  const connection = useLive();
  const signOut = useSignOut();
  const caller = useCaller();
  const section = sectionOf(useLocation().pathname);
  return (
    <>
      <a className="skip" href="#main">
        Skip to content
      </a>
      <header className={classes.header}>
        <div className={classes.bar}>
          <Link to="/" className={classes.name} aria-label="vcasgd, all jobs">
            <img src={mark} width={22} height={22} alt="" />
            vcasgd
          </Link>
          <nav className={classes.nav} aria-label="Pages">
            {SECTIONS.map(({ to, name }) => (
              <Link
                key={to}
                to={to}
                className={classes.link}
                aria-current={to === section ? "page" : undefined}
              >
                {name}
              </Link>
            ))}
          </nav>
          <div className={classes.tools}>
            <Connection state={connection} />
            <ThemeSwitch />
            <Tooltip
              label={caller ? `Sign out ${caller.name} (scope ${caller.scope})` : "Sign out"}
            >
              <ActionIcon
                variant="subtle"
                color="gray"
                aria-label="Sign out"
                onClick={() => signOut.mutate()}
              >
                <IconLogout size={17} stroke={1.6} />
              </ActionIcon>
            </Tooltip>
          </div>
        </div>
      </header>
      <main id="main" className={classes.main} tabIndex={-1}>
        <Breadcrumbs cluster={signedIn.cluster} />
        <Offline />
        <FullLedger />
        {children}
      </main>
    </>
  );
}

/** Notice while the API can't be reached. */
function Offline() {
  const outage = useOutage();
  if (!outage) return null;
  const { since, problem, remedy } = outage;
  const title = problem
    ? `The stack has had a problem since ${clock(since)}: ${problem}`
    : `Offline: the API has not answered since ${clock(since)}`;
  return (
    <div className={classes.offline}>
      <Notice tone="bad" title={title}>
        {remedy && `Remedy: ${remedy}. `}
        This page shows what was known then. It reconnects by itself.
      </Notice>
    </div>
  );
}

/** Notice while the ledger accepts no new jobs. */
function FullLedger() {
  const { data } = useStore();
  if (!data?.ledger.full) return null;
  return (
    <Notice tone="bad" title="The ledger is at its memory limit">
      New jobs are refused; running jobs continue, but their histories may have gaps. Delete jobs
      that have ended, or raise the ledger's maxmemory.
    </Notice>
  );
}
