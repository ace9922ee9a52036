//! Mutual TLS 1.3 between the daemons.
//!
//! Each daemon has a certificate that the fleet's authority signed and that contains its [`identity`]. Both sides of a
//! connection verify the peer's certificate ([`verify`]). Further permissions depend on the [`ConnectionCaller`].
//! Certificate files are read again when they change ([`ReloadableTlsCredentials`]). A connection is closed when the
//! peer's certificate expires or is revoked.
//!
//! * [`acceptor`], [`connect`]: the accepting and the connecting side
//! * [`table`]: the table `[tls]` in a daemon's configuration file
//! * [`authority`], [`command`]: certificate authority and the command `coreward certs`

pub mod acceptor;
mod atomic_file_writes;
pub mod authority;
pub mod caller;
pub mod certificate;
pub mod command;
pub mod connect;
mod credentials;
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
pub use atomic_file_writes::write_secret;
pub use caller::ConnectionCaller;
pub use credentials::{CredentialError, TlsCredentialFiles, read_certificates};
pub use file_watcher::FileWatcher;
pub use identity::{FleetIdentity, FleetRole, IdentityName};
pub use tls::ReloadableTlsCredentials;
pub use verify::ClientCertificatePolicy;
