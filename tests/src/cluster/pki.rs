//! The certificates of a cluster, all by one authority.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::Result;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    IsCa, KeyPair, KeyUsagePurpose, SanType,
};

/// An authority, and the key that signs the tokens of service accounts.
pub(super) struct Pki {
    authority: CertifiedIssuer<'static, KeyPair>,
    authority_file: PathBuf,
    accounts: Files,
}

/// A certificate with its key, as PEM.
pub(super) struct Identity {
    pub(super) certificate: String,
    pub(super) key: String,
}

/// The files of an [`Identity`], or of a key pair.
pub(super) struct Files {
    /// Or the public key.
    pub(super) certificate: PathBuf,
    pub(super) key: PathBuf,
}

impl Pki {
    /// Creates both, and writes the files that the server reads into a directory.
    pub(super) fn new(directory: &Path) -> Result<Self> {
        let mut own = params("cluster", None);
        own.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        own.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let authority = CertifiedIssuer::self_signed(own, KeyPair::generate()?)?;
        let authority_file = directory.join("ca.crt");
        fs::write(&authority_file, authority.pem())?;
        let accounts = KeyPair::generate()?;
        let accounts = Identity { certificate: accounts.public_key_pem(), key: accounts.serialize_pem() };
        Ok(Self { authority, authority_file, accounts: accounts.write(directory, "accounts")? })
    }

    /// The authority's certificate, as PEM.
    pub(super) fn authority(&self) -> String {
        self.authority.pem()
    }

    pub(super) fn authority_file(&self) -> &Path {
        &self.authority_file
    }

    /// The key pair that signs the tokens of service accounts.
    pub(super) fn accounts(&self) -> &Files {
        &self.accounts
    }

    /// For a server at these addresses.
    pub(super) fn server(&self, name: &str, addresses: &[IpAddr]) -> Result<Identity> {
        let mut own = params(name, None);
        own.subject_alt_names = addresses.iter().copied().map(SanType::IpAddress).collect();
        own.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.sign(own)
    }

    /// For a user of that name, in a group.
    pub(super) fn client(&self, name: &str, group: Option<&str>) -> Result<Identity> {
        let mut own = params(name, group);
        own.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(own)
    }

    fn sign(&self, mut own: CertificateParams) -> Result<Identity> {
        own.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate()?;
        let certificate = own.signed_by(&key, &self.authority)?;
        Ok(Identity { certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

impl std::fmt::Debug for Pki {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pki").field("authority", &self.authority_file).finish_non_exhaustive()
    }
}

impl Identity {
    /// Writes it into files of that name.
    pub(super) fn write(&self, directory: &Path, name: &str) -> Result<Files> {
        let files = Files {
            certificate: directory.join(format!("{name}.crt")),
            key: directory.join(format!("{name}.key")),
        };
        fs::write(&files.certificate, &self.certificate)?;
        fs::write(&files.key, &self.key)?;
        Ok(files)
    }
}

fn params(name: &str, group: Option<&str>) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    if let Some(group) = group {
        params.distinguished_name.push(DnType::OrganizationName, group);
    }
    params
}
