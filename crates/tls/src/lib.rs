//! Who coreward's parts are to each other, and how they know: mutual TLS 1.3.
//!
//! Every part has a certificate of the fleet's authority that says what it is ([`identity`]). Both sides look at the other's
//! ([`verify`]) while they shake hands; what somebody may do beyond that is asked of its [`Caller`]. Files are read again
//! when they change ([`Tls`]); connections go on meanwhile, each until the certificate that opened it expires or is revoked.
//!
//! * [`gate`]: who listens; [`connect`]: who connects
//! * [`table`]: `[tls]` in a daemon's file
//! * [`authority`], [`command`]: a small authority of one's own, `coreward certs`

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

pub use acceptor::{AcceptedConnection, ConnectionAcceptor, Limits};
pub use caller::Caller;
pub use credentials::{ClientCertificates, CredentialError, Files, read_certificates};
pub use disk::write_secret;
pub use file_watcher::FileWatcher;
pub use identity::{Identity, Name, Role};
pub use tls::Tls;
