locals {
  api_url = local.open ? "https://${google_compute_address.api[0].address}" : "http://127.0.0.1:8700"
}

output "api_url" {
  description = "As in VCASGD_API_URL; on this computer, through tunnel_command, unless api_cidrs are given."
  value       = local.api_url
}

output "dashboard_url" {
  description = "Where a browser finds what the API shows."
  value       = "${local.api_url}/"
}

output "token_command" {
  description = "Prints the API's token, as in VCASGD_TOKEN."
  value       = "gcloud secrets versions access latest --project ${var.project} --secret ${var.cluster}-api-token"
}

output "tunnel_command" {
  description = "Makes the API of the control plane answer on this computer's port 8700."
  value       = "gcloud compute ssh ${module.control_plane.name} --project ${var.project} --zone ${var.zones[0]} --tunnel-through-iap -- -N -L 8700:127.0.0.1:8700"
}

output "certificate_command" {
  description = "Fetches the API's certificate; name the file in SSL_CERT_FILE."
  value       = "gcloud storage cp ${module.bucket.url}/control/api.pem vcasgd-api.pem"
}

output "boot_error_command" {
  description = "Prints what failed on a machine, by its name and zone."
  value       = "gcloud compute instances get-guest-attributes NAME --project ${var.project} --zone ZONE --query-path vcasgd/"
}

output "storage_url" {
  description = "Packages, checkpoints and models."
  value       = module.bucket.url
}
