//! Where a controller's API is, and as whom a command asks.

use std::path::PathBuf;

use coreward_api::client::{Client, ControllerUrl};

/// Where the packaged controller writes it.
const DEFAULT_TOKEN_FILE: &str = "/var/lib/coreward/operator.token";

/// Which controller, and as whom.
#[derive(clap::Args)]
pub struct ApiArgs {
    /// Where the controller's API is (`api` in its file)
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:7401")]
    controller: ControllerUrl,
    /// File with the token of a role: the controller writes operator.token and viewer.token beside its store (else
    /// COREWARD_TOKEN_FILE, else /var/lib/coreward/operator.token)
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

impl ApiArgs {
    /// # Errors
    /// When the file with the token cannot be read.
    pub fn client(&self) -> anyhow::Result<Client> {
        let named = || std::env::var_os("COREWARD_TOKEN_FILE").map(PathBuf::from);
        let file = self.token_file.clone().or_else(named).unwrap_or_else(|| DEFAULT_TOKEN_FILE.into());
        Client::new(self.controller.clone(), &file)
    }
}
