resource "google_compute_network" "this" {
  name                    = var.cluster
  auto_create_subnetworks = false
}

# By default, machines have public addresses to reach package indexes without a gateway; all incoming
# traffic is denied.
resource "google_compute_subnetwork" "this" {
  name                     = var.cluster
  network                  = google_compute_network.this.id
  ip_cidr_range            = var.cidr
  private_ip_google_access = true
}

resource "google_compute_router" "this" {
  count = var.private ? 1 : 0

  name    = var.cluster
  network = google_compute_network.this.id
}

resource "google_compute_router_nat" "this" {
  count = var.private ? 1 : 0

  name                               = var.cluster
  router                             = google_compute_router.this[0].name
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "ALL_SUBNETWORKS_ALL_IP_RANGES"
}

locals {
  # Ray's processes choose their ports; ports below 1024 stay closed.
  inside = {
    ledger-from-store   = { to = "control", from = "store", ports = "6379" }
    ledger-from-worker  = { to = "control", from = "worker", ports = "6379" }
    ray-from-worker     = { to = "control", from = "worker", ports = "10000-65535" }
    ray-to-worker       = { to = "worker", from = "control", ports = "1024-65535" }
    ray-among-workers   = { to = "worker", from = "worker", ports = "1024-65535" }
    tensors-from-worker = { to = "store", from = "worker", ports = "6380" }
    tensors-from-ours   = { to = "store", from = "control", ports = "6380" }
  }
  # Between a server and its replica, and from and to the Sentinels that monitor both.
  replicas = var.replicated ? {
    tensors-from-store   = { to = "store", from = "store", ports = "6380" }
    sentinel-from-store  = { to = "store", from = "store", ports = "26379" }
    sentinel-from-ours   = { to = "store", from = "control", ports = "26379" }
    sentinel-from-worker = { to = "store", from = "worker", ports = "26379" }
    ours-from-store      = { to = "control", from = "store", ports = "26379" }
  } : {}
}

resource "google_compute_firewall" "inside" {
  for_each = merge(local.inside, local.replicas)

  name                    = "${var.cluster}-${each.key}"
  network                 = google_compute_network.this.id
  source_service_accounts = [var.accounts[each.value.from]]
  target_service_accounts = [var.accounts[each.value.to]]

  allow {
    protocol = "tcp"
    ports    = [each.value.ports]
  }
}

resource "google_compute_firewall" "api" {
  count = length(var.api_cidrs) > 0 ? 1 : 0

  name                    = "${var.cluster}-api"
  network                 = google_compute_network.this.id
  source_ranges           = var.api_cidrs
  target_service_accounts = [var.accounts.control]

  allow {
    protocol = "tcp"
    ports    = ["443"]
  }
}

resource "google_compute_firewall" "gateway" {
  count = var.gateway == null ? 0 : 1

  name                    = "${var.cluster}-gateway"
  network                 = google_compute_network.this.id
  source_ranges           = var.gateway.cidrs
  target_service_accounts = [var.accounts.control]

  allow {
    protocol = "tcp"
    ports    = [tostring(var.gateway.port)]
  }
}

# Authorities don't say from where they look.
resource "google_compute_firewall" "acme" {
  count = try(var.gateway.acme, false) ? 1 : 0

  name                    = "${var.cluster}-acme"
  network                 = google_compute_network.this.id
  source_ranges           = ["0.0.0.0/0"]
  target_service_accounts = [var.accounts.control]

  allow {
    protocol = "tcp"
    ports    = ["80"]
  }
}

# Shells and tunnels through Google's proxy, which authenticates users.
resource "google_compute_firewall" "tunnel" {
  name                    = "${var.cluster}-tunnel"
  network                 = google_compute_network.this.id
  source_ranges           = ["35.235.240.0/20"]
  target_service_accounts = [var.accounts.control, var.accounts.store]

  allow {
    protocol = "tcp"
    ports    = ["22"]
  }
}
