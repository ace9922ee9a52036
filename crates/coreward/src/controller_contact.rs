//! Command-line options that select the controllers and the caller's credential.

use std::path::PathBuf;

use coreward_control_server::config::DEFAULT_API_ADDRESS;
use coreward_http::client::{ApiCredential, ControllerClient, ControllerUrl};
use coreward_tls::TlsCredentialFiles;
use coreward_tls::verify::ExpectedControllerHost;

/// Path at which the controller of the distribution packages stores the operator's token.
const DEFAULT_OPERATOR_TOKEN_FILE: &str = "/var/lib/coreward/operator.token";

#[derive(clap::Args, Clone)]
pub struct ControllerContactArgs {
    /// The controller's API: ADDRESS:PORT on this host, or https://HOST:PORT. Several controllers are separated by
    /// commas; the command uses the leader
    #[arg(
        long,
        value_name = "ADDRESS:PORT",
        env = "COREWARD_CONTROLLER",
        value_delimiter = ',',
        default_values_t = [ControllerUrl::from(DEFAULT_API_ADDRESS)]
    )]
    controller: Vec<ControllerUrl>,
    /// File with the token of an operator or a viewer, from the controller's `token_directory`
    #[arg(long, value_name = "FILE", env = "COREWARD_TOKEN_FILE", default_value = DEFAULT_OPERATOR_TOKEN_FILE)]
    token_file: PathBuf,
    /// For https://: certificates of the trusted authorities (PEM)
    #[arg(long, value_name = "FILE", env = "COREWARD_CA")]
    ca: Option<PathBuf>,
    /// For https://: host or name that the controller's certificate must have; several separated by commas [default:
    /// the host of --controller, if the certificate names hosts]
    #[arg(long, value_name = "NAME", value_delimiter = ',', requires = "ca")]
    controller_name: Vec<String>,
    /// Certificate of an operator or a viewer, instead of a token (`coreward certs issue --role viewer`)
    #[arg(long, value_name = "FILE", env = "COREWARD_CERTIFICATE", requires = "ca", requires = "key")]
    certificate: Option<PathBuf>,
    /// Private key of --certificate
    #[arg(long, value_name = "FILE", env = "COREWARD_KEY", requires = "certificate")]
    key: Option<PathBuf>,
}

impl ControllerContactArgs {
    /// Creates a client of the controllers. Fails if a credential file cannot be read or is invalid.
    pub fn build_client(&self) -> anyhow::Result<ControllerClient> {
        let to_files =
            |((ca, certificate), key)| TlsCredentialFiles { ca_path: ca, certificate_path: certificate, key_path: key };
        let certificate_files = self.ca.clone().zip(self.certificate.clone()).zip(self.key.clone()).map(to_files);
        let build_token_credential = || ApiCredential::Token { file: self.token_file.clone(), ca: self.ca.clone() };
        let credential = certificate_files.map_or_else(build_token_credential, ApiCredential::Certificate);
        let expected_host = match self.controller_name.as_slice() {
            [] => ExpectedControllerHost::Requested,
            names => ExpectedControllerHost::OneOf(names.to_vec()),
        };
        ControllerClient::with_controllers(self.controller.clone(), &credential, expected_host)
    }
}
