output "api_url" {
  description = "As in VCASGD_API_URL; the command line finds it by itself unless home is set."
  value       = "http://127.0.0.1:${var.port}"

  depends_on = [terraform_data.stack]
}

output "dashboard_url" {
  description = "Where a browser finds what the API shows."
  value       = "http://127.0.0.1:${var.port}/"
}

output "token_command" {
  description = "Prints the API's token, as in VCASGD_TOKEN."
  value       = local.home == "" ? "cat \"$${VCASGD_HOME:-$HOME/.vcasgd}/token\"" : "cat '${local.home}/token'"
}
