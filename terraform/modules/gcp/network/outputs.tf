output "network_id" {
  description = "The network."
  value       = google_compute_network.this.id
}

output "subnetwork_id" {
  description = "The subnetwork, in all zones of the region."
  value       = google_compute_subnetwork.this.id
}

output "cidr" {
  description = "Address range of the subnetwork."
  value       = google_compute_subnetwork.this.ip_cidr_range
}
