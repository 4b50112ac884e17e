locals {
  api_url = local.open ? "https://${google_compute_address.api[0].address}" : "http://127.0.0.1:${var.tunnel_port}"
}

output "api_url" {
  description = "Value for VCASGD_API_URL. Without api_cidrs it needs tunnel_command."
  value       = local.api_url
}

output "dashboard_url" {
  description = "URL of the dashboard."
  value       = "${local.api_url}/"
}

output "token_command" {
  description = "Command that prints the API's token, for VCASGD_TOKEN."
  value       = "gcloud secrets versions access latest --project ${var.project} --secret ${var.cluster}-api-token"
}

output "join_url" {
  description = "URL for vcasgd join, on machines elsewhere. Null without gateway."
  value       = try(local.join.url, null)
}

output "join_token_command" {
  description = "Command that makes a token for the machines of one person, with VCASGD_API_URL and VCASGD_TOKEN. Null without gateway."
  value       = try("vcasgd token create NAME --join --pool ${var.gateway.pool} --max-machines 2 --expires 30d", null)
}

output "tunnel_command" {
  description = "Command that forwards this computer's tunnel_port to the API."
  value       = "gcloud compute ssh ${module.control_plane.name} --project ${var.project} --zone ${local.zones[0]} --tunnel-through-iap -- -N -L ${var.tunnel_port}:127.0.0.1:8700"
}

output "shell_command" {
  description = "Command that opens a shell on the control plane."
  value       = "gcloud compute ssh ${module.control_plane.name} --project ${var.project} --zone ${local.zones[0]} --tunnel-through-iap"
}

output "certificate_command" {
  description = "Command that fetches the certificate of the API's authority; name the file in VCASGD_CA_FILE."
  value       = "gcloud storage cp ${module.bucket.url}/control/api.pem vcasgd-api.pem"
}

output "boot_error_command" {
  description = "Command that prints the boot failure of a machine, by name and zone."
  value       = "gcloud compute instances get-guest-attributes NAME --project ${var.project} --zone ZONE --query-path vcasgd/"
}

output "storage_url" {
  description = "URL of packages, checkpoints, and models."
  value       = module.bucket.url
}

output "prices_of" {
  description = "Date and source of the list prices. Budgets rely on them; replace them with prices."
  value       = "${local.price_table.as_of}: ${local.price_table.source}"
}
