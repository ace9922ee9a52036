//! The command `coreward certs`, which creates a certificate authority and issues certificates.

use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::Context as _;
use comfy_table::Table;
use rustls::pki_types::ServerName;

use crate::authority::{
    AuthorityRolloverStep, CertificateAuthority, CertificateValidity, DAY, MACHINE_CLOCK_TOLERANCE,
};
use crate::certificate::{Certificate, unix_now};
use crate::credentials::read_certificates;
use crate::identity::{FleetIdentity, FleetRole, IdentityName};

/// Options of `coreward certs`.
#[derive(clap::Args)]
pub struct CertsArgs {
    #[command(subcommand)]
    command: CertsCommand,
}

#[derive(clap::Subcommand)]
enum CertsCommand {
    /// Create the fleet's certificate authority: a key that stays on this machine, and ca.crt for every daemon
    Init {
        /// Name of the fleet; certificates of other fleets are rejected
        #[arg(long, value_name = "NAME")]
        fleet: IdentityName,
        /// Validity of the authority (days)
        #[arg(long, default_value_t = 3650, value_parser = clap::value_parser!(u32).range(1..=36_500))]
        days: u32,
        #[command(flatten)]
        authority_args: CertificateAuthorityArgs,
    },
    /// Issue a certificate: write certificate, key and ca.crt into a directory to copy to the machine
    Issue {
        /// Role of the certificate's owner: controller, agent, lb, rack, operator or viewer
        #[arg(long)]
        role: FleetRole,
        /// Name of the owner: the server in the fleet document (agent), `name` of the load balancer (lb), any name
        /// (other roles, for logs)
        #[arg(long)]
        name: IdentityName,
        /// Host name or address of the controller's API for browsers and curl; may be repeated
        #[arg(long, value_name = "NAME|ADDRESS", value_parser = parse_host)]
        address: Vec<String>,
        /// Validity of the certificate (days)
        #[arg(long, default_value_t = 90, value_parser = clap::value_parser!(u32).range(1..=3650))]
        days: u32,
        /// Directory for the three files [default: ROLE-NAME in the authority's directory]
        #[arg(long, value_name = "DIRECTORY")]
        out: Option<PathBuf>,
        #[command(flatten)]
        authority_args: CertificateAuthorityArgs,
    },
    /// Renew certificates and keys
    Renew {
        /// Directories that `coreward certs issue` wrote
        #[arg(required = true, value_name = "DIRECTORY")]
        bundles: Vec<PathBuf>,
        /// Validity of the new certificates (days) [default: the validity of the old certificate]
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=3650))]
        days: Option<u32>,
        #[command(flatten)]
        authority_args: CertificateAuthorityArgs,
    },
    /// Show owner, validity and fingerprint of each certificate
    Show {
        /// Certificate files (PEM)
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
    /// Replace the authority in three steps, during which all daemons accept each other's certificates
    RollOver {
        /// Step of the replacement
        step: AuthorityRolloverStep,
        /// Validity of the new authority (days)
        #[arg(long, default_value_t = 3650, value_parser = clap::value_parser!(u32).range(1..=36_500))]
        days: u32,
        #[command(flatten)]
        authority_args: CertificateAuthorityArgs,
    },
}

#[derive(clap::Args)]
struct CertificateAuthorityArgs {
    /// Directory of the authority
    #[arg(long, value_name = "DIRECTORY", default_value = "certs")]
    directory: PathBuf,
}

fn days_to_duration(days: u32) -> Duration {
    DAY * days
}

/// Runs `coreward certs` and returns its output. Fails when files cannot be read or written, or are invalid.
pub fn run_certs_command(args: &CertsArgs) -> anyhow::Result<String> {
    match &args.command {
        CertsCommand::Init { fleet, days: length, authority_args: folder } => {
            let authority = CertificateAuthority::init(&folder.directory, fleet, days_to_duration(*length))?;
            let directory = folder.directory.display();
            Ok(format!(
                "{}: the authority of fleet {fleet}, for every part\n{directory}/authority.key: keep it here, who has \
                 it is everybody",
                authority.ca_path().display()
            ))
        }
        CertsCommand::Issue { role, name, address, days: length, out, authority_args: folder } => {
            let authority = CertificateAuthority::open(&folder.directory)?;
            let identity = FleetIdentity { fleet: authority.fleet_name()?, role: *role, name: name.clone() };
            let default_bundle_directory = || folder.directory.join(format!("{role}-{name}").replace('/', "_"));
            let output_directory = out.clone().unwrap_or_else(default_bundle_directory);
            ensure_bundle_has_same_owner(&output_directory, &identity)?;
            issue_and_write_bundle(&authority, &identity, address, days_to_duration(*length), &output_directory)?;
            Ok(format!(
                "{}: for {identity}, {length} days. In its file, with the directory at its machine:\n\n[tls]\nca = \
                 \"ca.crt\"\n\
                 certificate = \"own.crt\"\nkey = \"own.key\"",
                output_directory.display()
            ))
        }
        CertsCommand::Renew { bundles, days: length, authority_args: folder } => {
            let authority = CertificateAuthority::open(&folder.directory)?;
            let lines: anyhow::Result<Vec<String>> = bundles
                .iter()
                .map(|bundle| renew_certificate_bundle(&authority, bundle, length.map(days_to_duration)))
                .collect();
            Ok(lines?.join("\n"))
        }
        CertsCommand::Show { files } => format_certificate_table(files),
        CertsCommand::RollOver { step, days: length, authority_args: folder } => {
            roll_over_authority(&folder.directory, *step, days_to_duration(*length))
        }
    }
}

/// Checks that the text is a DNS name or an IP address, which a certificate can contain, and returns it.
fn parse_host(text: &str) -> Result<String, String> {
    let invalid_host_text =
        || format!("{text:?}: expected a host name or an IP address, as \"c1.example\" or \"10.1.0.1\"");
    ServerName::try_from(text).map(|_| text.to_owned()).map_err(|_| invalid_host_text())
}

/// Checks that the directory contains no certificate of another owner, which would be overwritten.
fn ensure_bundle_has_same_owner(bundle_directory: &Path, identity: &FleetIdentity) -> anyhow::Result<()> {
    let certificate_path = bundle_directory.join("own.crt");
    let Ok(certificates) = read_certificates(&certificate_path) else { return Ok(()) };
    if let Some(other_identity) =
        certificates.first().and_then(|certificate| certificate.identity.as_ref()).filter(|other| *other != identity)
    {
        anyhow::bail!(
            "{} is for {other_identity} of fleet {}: expected another --out for {identity}",
            certificate_path.display(),
            other_identity.fleet
        );
    }
    Ok(())
}

fn issue_and_write_bundle(
    authority: &CertificateAuthority,
    identity: &FleetIdentity,
    addresses: &[String],
    validity_duration: Duration,
    output_directory: &Path,
) -> anyhow::Result<()> {
    authority
        .issue_certificate(identity, addresses, CertificateValidity::from_now(validity_duration))?
        .write_files(output_directory, authority)
}

/// Executes a step of the authority's replacement. Returns instructions for the operator's next step.
fn roll_over_authority(directory: &Path, step: AuthorityRolloverStep, validity: Duration) -> anyhow::Result<String> {
    let authority = CertificateAuthority::open(directory)?;
    authority.perform_rollover_step(step, validity)?;
    let next_step_text = match step {
        AuthorityRolloverStep::Begin => {
            "copy the new ca.crt to every daemon, or `coreward certs renew` all bundles; then `switch`"
        }
        AuthorityRolloverStep::Switch => "`coreward certs renew` all bundles, and copy them; then `finish`",
        AuthorityRolloverStep::Finish => "copy the new ca.crt to every daemon, or renew its certificate when due",
    };
    Ok(format!("{}: {next_step_text}", authority.ca_path().display()))
}

fn renew_certificate_bundle(
    authority: &CertificateAuthority,
    bundle_directory: &Path,
    validity_duration: Option<Duration>,
) -> anyhow::Result<String> {
    let certificate_path = bundle_directory.join("own.crt");
    let old_certificate = read_certificates(&certificate_path)?.swap_remove(0);
    let identity = old_certificate
        .identity
        .with_context(|| format!("{} has no identity of a fleet", certificate_path.display()))?;
    let fleet = authority.fleet_name()?;
    anyhow::ensure!(
        identity.fleet == fleet,
        "{}: it is of fleet {}, the authority of {fleet}",
        certificate_path.display(),
        identity.fleet
    );
    let new_validity_duration = validity_duration
        .unwrap_or(old_certificate.not_after.saturating_sub(old_certificate.not_before + MACHINE_CLOCK_TOLERANCE));
    issue_and_write_bundle(authority, &identity, &old_certificate.hosts, new_validity_duration, bundle_directory)?;
    Ok(format!(
        "{}: for {identity}, until {}",
        bundle_directory.display(),
        format_date(unix_now() + new_validity_duration)
    ))
}

fn format_date(since_1970: Duration) -> String {
    humantime::format_rfc3339_seconds(UNIX_EPOCH + since_1970).to_string()
}

fn format_certificate_table(files: &[PathBuf]) -> anyhow::Result<String> {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["file", "for", "fleet", "until", "addresses", "fingerprint (SHA-256)"]);
    for file in files {
        for certificate in read_certificates(file)? {
            table.add_row(format_certificate_row(file, &certificate));
        }
    }
    Ok(table.to_string())
}

fn format_certificate_row(file: &Path, certificate: &Certificate) -> [String; 6] {
    let owner_and_fleet = match &certificate.identity {
        Some(identity) => (identity.to_string(), identity.fleet.to_string()),
        None if certificate.is_authority => (format!("authority: {}", certificate.subject), String::new()),
        None => (certificate.subject.clone(), String::new()),
    };
    let validity = match certificate.remaining_validity(unix_now()) {
        Duration::ZERO => format!("{} (expired)", format_date(certificate.not_after)),
        _ => format_date(certificate.not_after),
    };
    let addresses = certificate.hosts.join(", ");
    [
        file.display().to_string(),
        owner_and_fleet.0,
        owner_and_fleet.1,
        validity,
        addresses,
        certificate.fingerprint.to_string(),
    ]
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct TestCli {
        #[command(flatten)]
        certs: CertsArgs,
    }

    #[test]
    fn certificate_bundle_has_one_role_and_valid_hosts() {
        let directory = tempfile::tempdir().unwrap();
        let authority_directory = directory.path().join("certs");
        let run_certs = |arguments: &[&str]| {
            let arguments = [&["certs"], arguments, &["--directory", authority_directory.to_str().unwrap()]].concat();
            let cli = TestCli::try_parse_from(arguments).map_err(|error| error.to_string())?;
            run_certs_command(&cli.certs).map_err(|error| error.to_string())
        };
        run_certs(&["init", "--fleet", "prod"]).unwrap();
        for valid_host in ["c1.example", "10.1.0.1", "fd00::1", "localhost"] {
            run_certs(&["issue", "--role", "controller", "--name", "c1", "--address", valid_host]).unwrap();
        }
        for invalid_host in ["bad host", "", "https://c1.example", "10.1.0.1:7401"] {
            let error =
                run_certs(&["issue", "--role", "controller", "--name", "c1", "--address", invalid_host]).unwrap_err();
            assert!(error.contains("expected a host name or an IP address"), "{error}");
        }
        // Both names would be mapped to the same directory.
        run_certs(&["issue", "--role", "agent", "--name", "a/b"]).unwrap();
        let key = std::fs::read(authority_directory.join("agent-a_b/own.key")).unwrap();
        let error = run_certs(&["issue", "--role", "agent", "--name", "a_b"]).unwrap_err();
        assert!(error.contains("own.crt is for agent a/b of fleet prod: expected another --out"), "{error}");
        assert_eq!(std::fs::read(authority_directory.join("agent-a_b/own.key")).unwrap(), key);
        run_certs(&["issue", "--role", "agent", "--name", "a/b"]).unwrap();
    }
}
