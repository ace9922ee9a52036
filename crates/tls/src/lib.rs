//! Mutual TLS 1.3 between the daemons.
//!
//! Each daemon has a certificate of the fleet's authority with its [`identity`]. Both sides verify the peer's
//! certificate ([`verify`]); further permissions depend on the [`Caller`]. Changed files are read again ([`Tls`]). A
//! connection lives until its certificate expires or is revoked.
//!
//! * [`acceptor`], [`connect`]: both sides
//! * [`table`]: `[tls]` in a daemon's file
//! * [`authority`], [`command`]: a certificate authority, `coreward certs`

pub mod acceptor;
pub mod authority;
pub mod caller;
pub mod certificate;
pub mod command;
pub mod connect;
mod credentials;
mod disk;
pub mod failure;
mod file_watcher;
pub mod identity;
pub mod io;
pub mod table;
#[cfg(test)]
mod tests;
mod tls;
pub mod verify;

pub use acceptor::{AcceptedConnection, AcceptorLimits, ConnectionAcceptor};
pub use caller::Caller;
pub use credentials::{CredentialError, CredentialFiles, read_certificates};
pub use disk::write_secret;
pub use file_watcher::FileWatcher;
pub use identity::{Identity, Name, Role};
pub use tls::Tls;
pub use verify::ClientCertificates;
