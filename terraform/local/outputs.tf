output "api_url" {
  description = "Value for VCASGD_API_URL. The command line finds it unless home is set."
  value       = "http://127.0.0.1:${var.port}"

  depends_on = [terraform_data.stack]
}

output "dashboard_url" {
  description = "URL of the dashboard."
  value       = "http://127.0.0.1:${var.port}/"
}

output "token_command" {
  description = "Command that prints the API's token, for VCASGD_TOKEN."
  value       = local.home == "" ? "cat \"$${VCASGD_HOME:-$HOME/.vcasgd}/token\"" : "cat '${local.home}/token'"
}
