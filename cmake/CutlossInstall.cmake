# find_package(cutloss), pkg-config, headers and the library.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(cutloss_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/cutloss")
install(TARGETS cutloss EXPORT cutlossTargets)
install(DIRECTORY include/cutloss DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(EXPORT cutlossTargets NAMESPACE cutloss:: DESTINATION "${cutloss_package_dir}")

configure_package_config_file(cmake/cutlossConfig.cmake.in "${PROJECT_BINARY_DIR}/cutlossConfig.cmake"
                              INSTALL_DESTINATION "${cutloss_package_dir}")
# Before 1.0 a minor release may change the interface.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/cutlossConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/cutlossConfig.cmake" "${PROJECT_BINARY_DIR}/cutlossConfigVersion.cmake"
              cmake/CutlossHighway.cmake
        DESTINATION "${cutloss_package_dir}")

configure_file(cmake/cutloss.pc.in "${PROJECT_BINARY_DIR}/cutloss.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/cutloss.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
