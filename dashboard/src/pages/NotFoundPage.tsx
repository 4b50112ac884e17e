import { Anchor } from "@mantine/core";
import { Link } from "react-router";
import { EmptyState } from "../components/EmptyState";
import { PageHead } from "../components/PageHead";

export function NotFoundPage() {
  return (
    <>
      <PageHead title="Page not found" />
      <EmptyState title="This page does not exist">
        <Anchor component={Link} to="/">
          All jobs
        </Anchor>
      </EmptyState>
    </>
  );
}
