import { Center, Loader } from "@mantine/core";
import { lazy, Suspense } from "react";
import { Route, Routes } from "react-router";
import { useSignedIn } from "./api/signIn";
import { ErrorState } from "./components/ErrorState";
import { Shell } from "./components/Shell";
import { FleetPage } from "./pages/FleetPage";
import { JobsPage } from "./pages/JobsPage";
import { NotFoundPage } from "./pages/NotFoundPage";
import { SignInPage } from "./pages/SignInPage";
import { StorePage } from "./pages/StorePage";

const JobPage = lazy(() => import("./pages/JobPage"));
const ComparePage = lazy(() => import("./pages/ComparePage"));
const SubmitPage = lazy(() => import("./pages/SubmitPage"));

export function App() {
  const signedIn = useSignedIn();
  if (signedIn.isPending) {
    return <Waiting />;
  }
  // Without an answer, the page shows what it has.
  if (signedIn.isError && signedIn.data === undefined) {
    return (
      <Center mih="100vh" p="md">
        <ErrorState error={signedIn.error} onRetry={() => signedIn.refetch()} />
      </Center>
    );
  }
  if (!signedIn.data) {
    return <SignInPage />;
  }
  return (
    <Shell signedIn={signedIn.data}>
      <Suspense fallback={<Waiting />}>
        <Routes>
          <Route path="/" element={<JobsPage />} />
          <Route path="/submit" element={<SubmitPage />} />
          <Route path="/compare" element={<ComparePage />} />
          <Route path="/jobs/:id" element={<JobPage />} />
          <Route path="/fleet" element={<FleetPage />} />
          <Route path="/store" element={<StorePage />} />
          <Route path="*" element={<NotFoundPage />} />
        </Routes>
      </Suspense>
    </Shell>
  );
}

function Waiting() {
  return (
    <Center mih="60vh">
      <Loader size="sm" aria-label="Loading" />
    </Center>
  );
}
