locals {
  api_url = local.open ? "https://${aws_eip.api[0].public_ip}" : "http://127.0.0.1:${var.tunnel_port}"
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
  value       = "aws secretsmanager get-secret-value --region ${var.region} --secret-id ${module.identity.secrets["api-token"]} --query SecretString --output text"
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
  value       = "aws ssm start-session --region ${var.region} --target ${module.control_plane.instance_id} --document-name AWS-StartPortForwardingSession --parameters portNumber=8700,localPortNumber=${var.tunnel_port}"
}

output "shell_command" {
  description = "Command that opens a shell on the control plane."
  value       = "aws ssm start-session --region ${var.region} --target ${module.control_plane.instance_id}"
}

output "certificate_command" {
  description = "Command that fetches the certificate of the API's authority; name the file in VCASGD_CA_FILE."
  value       = "aws s3 cp --region ${var.region} ${module.bucket.url}/control/api.pem vcasgd-api.pem"
}

output "boot_errors_command" {
  description = "Command that lists boot failures of the machines."
  value       = "aws ec2 describe-tags --region ${var.region} --filters Name=key,Values=vcasgd:boot-error --query 'Tags[].[ResourceId,Value]' --output text"
}

output "storage_url" {
  description = "URL of packages, checkpoints, and models."
  value       = module.bucket.url
}

output "prices_of" {
  description = "Date and source of the list prices. Budgets rely on them; replace them with prices."
  value       = "${local.price_table.as_of}: ${local.price_table.source}"
}
